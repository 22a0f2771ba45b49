"""What is made of the figures: rows, a table, pictures, a page, fits."""
