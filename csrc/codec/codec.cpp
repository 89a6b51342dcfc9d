// Placeholder of the codec library; replaced by the kernels.
