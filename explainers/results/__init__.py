"""results.json: the numbers of evaluations, and the settings that they depend on."""
