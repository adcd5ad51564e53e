"""Constants and error intervals, fitted to published runs or to a user's own measurements."""
