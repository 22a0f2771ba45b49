"""Words everything speaks: dtypes, specs, options, reports, errors. No torch import."""
