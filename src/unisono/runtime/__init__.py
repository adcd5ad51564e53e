"""What runs plans: the reference executor, the native executor, and how ranks meet."""
