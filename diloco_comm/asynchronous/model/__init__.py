"""The shared model of asynchronous training, its versions and the rules that update it."""
