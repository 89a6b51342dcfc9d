// While a thread has a SerialScope, the operators that it calls use no other threads. The exchange
// engine's thread needs this: it must not start an intra-op pool beside the training loop's.
#pragma once

namespace diloco::codec {

class SerialScope {
  public:
    SerialScope();
    ~SerialScope();
    SerialScope(const SerialScope&) = delete;
    SerialScope& operator=(const SerialScope&) = delete;

    static bool is_active();

  private:
    bool previous_;
};

}  // namespace diloco::codec
