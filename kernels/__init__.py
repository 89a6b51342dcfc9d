"""Triton kernels, installed as ``diloco_comm.kernels``."""

if __name__ == "kernels":
    # Seen from the root of the sources, this folder hides the PyPI package of that name. Libraries
    # that look for a version of it (transformers does) find none that they would use.
    __version__ = "0"

    def __getattr__(name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ImportError(
            "this folder is installed as diloco_comm.kernels; import it under that name"
        )
