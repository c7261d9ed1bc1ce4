"""From a run to predictions on new inputs."""
