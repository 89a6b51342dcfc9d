#include "codec/simd/vec_avx2.h"
// The vector type comes first: the kernels are written over it.
#include "codec/simd/kernels.h"

namespace diloco::codec {

const Kernels kAvx2Kernels{"avx2", encode, decode, outer_step, merge,
                           norms,  dot,    digest, dot_codes,  kFloors};

}  // namespace diloco::codec
