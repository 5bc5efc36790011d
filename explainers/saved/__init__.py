"""What lies on disk, and what it belongs to: files, weights, identities, versions."""
