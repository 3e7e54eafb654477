"""Stages of a trial: where rounds restart, parts of a training, deployments. Pure."""
