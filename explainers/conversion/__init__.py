"""Models of other libraries as models to explain."""
