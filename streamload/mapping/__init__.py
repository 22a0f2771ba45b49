"""Name tables and transforms: declarative data that knows neither sources nor models."""
