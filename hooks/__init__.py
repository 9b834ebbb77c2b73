"""All that runs inside the training process: the recorder, and the probes that feed it."""
