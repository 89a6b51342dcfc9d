"""Triton kernels, installed as ``diloco_comm.kernels``."""

if __name__ == "kernels":
    # With the root of the sources on the import path, this folder hides the PyPI package "kernels".
    # Version 0 tells libraries that check for that package, such as transformers, not to use it.
    __version__ = "0"

    def __getattr__(name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ImportError(
            "this folder is installed as diloco_comm.kernels; import it under that name"
        )
