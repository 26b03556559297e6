// Integer operations of the unit `additive`, as device.cuh has the others; the host's are in host/shim.hpp.
#pragma once
#include "device.cuh"

#ifdef __CUDACC__
/// c plus the products of the four signed bytes of a and b.
FB_DEVICE int32_t dot4(uint32_t a, uint32_t b, int32_t c) { return __dp4a((int32_t)a, (int32_t)b, c); }
#endif
