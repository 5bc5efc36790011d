"""Files on disk, and the models and settings they belong to: files, weights, identities, versions."""
