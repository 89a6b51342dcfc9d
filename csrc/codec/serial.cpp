#include "codec/serial.h"

namespace diloco::codec {
namespace {

thread_local bool is_serial = false;

}  // namespace

SerialScope::SerialScope() : previous_(is_serial) { is_serial = true; }
SerialScope::~SerialScope() { is_serial = previous_; }
bool SerialScope::is_active() { return is_serial; }

}  // namespace diloco::codec
