// The same unit for the host: instances register themselves by name.
#include "registry.hpp"

#define FB_GEMV(name, Lo, Hi) static const bool name##_known = add(#name, +[](const GemvArgs& a) { gemv<Lo, Hi>(a); });
#define FB_DEQUANT(name, E) static const bool name##_known = add(#name, +[](const DequantArgs& a) { dequant<E>(a); });
#include FB_UNIT
