"""Triton kernels, installed as ``diloco_comm.kernels``."""

if __name__ == "kernels":
    raise ImportError("this folder is installed as diloco_comm.kernels; import it under that name")
