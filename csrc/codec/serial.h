// A thread that holds a SerialScope runs the operators on itself alone: the exchange engine's
// thread must not start an intra-op pool of its own beside the training loop's.
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
