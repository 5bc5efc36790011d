"""Image files: which there are below a folder, and their pixels."""
