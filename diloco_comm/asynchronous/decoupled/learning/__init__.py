"""The learner's side of the network: the courier's thread, and the object in the training loop."""
