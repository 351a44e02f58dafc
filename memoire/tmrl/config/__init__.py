"""Configuration of a pipeline: `import memoire.tmrl.config.config_constants as cfg`."""
