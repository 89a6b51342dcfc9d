// Any bytes for a link, and frames that are almost right. None of these inputs may crash the link,
// hold the link up, write where no receive is posted, or leave wrong bytes in a receive. Any
// answers of a proxy end in one sentence or in a granted request.
//
// Clang's libFuzzer calls LLVMFuzzerTestOneInput; without it main() reads the inputs from a folder.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "exchange/link/proxy.h"
#include "link_world.h"

using namespace diloco_test;
using namespace std::chrono_literals;
using diloco::link::Frame;
using diloco::link::FrameKind;
using diloco::link::Status;

namespace {

constexpr uint64_t kSizes[] = {0,    1,     24,    1023,   1024,   1025,
                               4475, 65525, 70000, 262144, 262145, ~uint64_t{0}};
constexpr uint64_t kMostPayload = 262145;

// The byte that belongs at an offset of any message.
uint8_t byte_at(uint64_t offset) { return static_cast<uint8_t>(offset * 31 + (offset >> 8) + 7); }

// Reads an input; zeros follow its end.
class Input {
  public:
    Input(const uint8_t* data, size_t size) : data_(data), size_(size) {}

    bool is_over() const { return at_ >= size_; }
    uint8_t byte() { return is_over() ? 0 : data_[at_++]; }
    uint64_t size() { return kSizes[byte() % std::size(kSizes)]; }
    Bytes rest(size_t most) {
        const size_t end = at_ + std::min(most, size_ - std::min(at_, size_));
        const Bytes bytes(data_ + std::min(at_, size_), data_ + end);
        at_ = end;
        return bytes;
    }

  private:
    const uint8_t* data_;
    size_t size_, at_ = 0;
};

// A process that has connected to a link, and then says what an input holds.
class Liar {
  public:
    explicit Liar(const LinkPtr& link) : member(link, 1), socket_(link->address()) {
        static int number = 0;
        const std::string nonce(32, '5');
        Places all = places({link});
        all.push_back({nonce, "", ""});
        std::thread connecting(
            [&, token = "lies" + std::to_string(++number)] { member.connect(token, 0, all); });
        EXPECT(socket_.greet(link->nonce()).status == static_cast<uint32_t>(Status::kWelcome));
        token_ = token_of_join([&](void* data, size_t size) { return socket_.read(data, size); });
        Frame answer = frame(FrameKind::kJoin);
        answer.total = 1;
        EXPECT(socket_.write(answer));
        connecting.join();
    }

    Frame frame(FrameKind kind) const {
        Frame made;
        made.kind = static_cast<uint8_t>(kind);
        made.token = token_;
        return made;
    }

    // One frame with fields that the input chooses, or bytes as they are.
    void say(Input& input) {
        const uint8_t choice = input.byte();
        if (choice % 16 >= 14 && choice < 128) {
            const Bytes bytes = input.rest(choice);
            socket_.write(bytes.data(), bytes.size());
            return;
        }
        Frame made = frame(static_cast<FrameKind>(choice % 16));
        made.number = input.byte() % 4;
        made.tag = input.byte() % 8;
        made.ticket = input.byte() % 16;
        made.offset = input.size();
        made.total = input.size();
        const auto kind = static_cast<FrameKind>(made.kind);
        const bool has_payload = diloco::link::is_short(made.kind) || kind == FrameKind::kData ||
                                 kind == FrameKind::kCopy || kind == FrameKind::kTell;
        if (has_payload || choice >= 224) made.length = static_cast<uint32_t>(input.size());
        if (choice >= 240) made.token = input.byte();
        Bytes bytes(sizeof(made) + std::min<uint64_t>(made.length, kMostPayload));
        std::memcpy(bytes.data(), &made, sizeof(made));
        const uint64_t begin = kind == FrameKind::kData ? made.offset : 0;
        for (size_t i = sizeof(made); i < bytes.size(); ++i) {
            bytes[i] = byte_at(begin + i - sizeof(made));
        }
        socket_.write(bytes.data(), bytes.size());
    }

    // Reads until the link has answered a ping, or has closed the connection.
    void hear() {
        socket_.write(frame(FrameKind::kPing));
        Frame heard;
        while (true) {
            // The link may take the ping for the rest of a frame. Zeros are the rest, and no frame.
            if (!socket_.has_bytes(100ms)) {
                const Bytes zeros(2 * kMostPayload);
                socket_.write(zeros.data(), zeros.size());
            }
            if (!socket_.read(&heard, sizeof(heard))) break;
            EXPECT(heard.magic == Frame::kFrameMagic);
            EXPECT(heard.length <= diloco::link::kFragmentBytes);
            if (heard.kind == static_cast<uint8_t>(FrameKind::kPong)) return;
            Bytes payload(heard.length);
            if (heard.length > 0 && !socket_.read(payload.data(), payload.size())) return;
        }
        EXPECT(errno != EAGAIN && errno != EWOULDBLOCK);
    }

    Member member;

  private:
    Stranger socket_;
    uint64_t token_ = 0;
};

void lie(const LinkPtr& link, Input& input) {
    Liar liar(link);
    std::vector<Bytes> in, out;
    std::vector<Work> recvs, sends;
    for (const size_t size : {24, 1024, 1025, 70000}) {
        in.emplace_back(size);
        out.emplace_back(size, uint8_t{1});
    }
    for (size_t i = 0; i < in.size(); ++i) {
        recvs.push_back(liar.member.recv(1, static_cast<int>(i), in[i], static_cast<int>(i) % 2));
        sends.push_back(liar.member.send(1, static_cast<int>(i), out[i], static_cast<int>(i) % 2));
    }
    while (!input.is_over()) liar.say(input);
    liar.hear();
    for (const Work& work : sends) work.cancel();
    for (size_t i = 0; i < in.size(); ++i) {
        recvs[i].cancel();
        // Between the threads: the link has let go of the message.
        if (!recvs[i].is_done() || !recvs[i].message->error.empty()) continue;
        if (recvs[i].message->moved != in[i].size()) continue;
        for (size_t at = 0; at < in[i].size(); ++at) EXPECT(in[i][at] == byte_at(at));
    }
}

// Two honest processes. The first one is lied to.
class World {
  public:
    World() : members_(connect_new(2, "honest")) {}

    const LinkPtr& link() const { return members_[0].link; }

    void check() const {
        for (const size_t size : {size_t{24}, size_t{300000}}) {
            for (const int from : {0, 1}) {
                const Bytes sent = pattern(size, from);
                Bytes received(size);
                const Work recv = members_[1 - from].recv(from, 1, received);
                const Work send = members_[from].send(1 - from, 1, sent);
                EXPECT(members_[from].wait(send) && members_[1 - from].wait(recv));
                EXPECT(sent == received);
            }
        }
    }

  private:
    Members members_;
};

// Any answers of a proxy, in pieces.
void answer(Input& input) {
    const uint8_t kind = input.byte();
    diloco::link::Proxy proxy{(kind & 1) != 0, "proxy", "3128"};
    if ((kind & 2) != 0) proxy.user = "alice";
    if ((kind & 4) != 0) proxy.password = "secret";
    diloco::link::ProxyRequest request(proxy, "host", "29700");
    while (!input.is_over() && !request.is_granted() && request.trouble().empty()) {
        request.take_due();
        const Bytes piece = input.rest(1 + input.byte() % 64);
        request.feed(piece.data(), piece.size());
    }
    if (request.is_granted() && request.trouble().empty()) return;
    request.end();
    const std::string& trouble = request.trouble();
    EXPECT(!trouble.empty() && trouble.size() < 400);
    EXPECT(std::all_of(trouble.begin(), trouble.end(), [](char c) { return c >= ' ' && c < 127; }));
}

void take(const uint8_t* data, size_t size) {
    static World world;
    static int count = 0;
    Input input(data, size);
    const uint8_t first = input.byte();
    if (first == 255) return answer(input);
    if (first % 8 == 0) {
        const Stranger stranger(world.link()->address());
        const Bytes bytes = input.rest(size);
        stranger.write(bytes.data(), bytes.size());
    } else {
        lie(world.link(), input);
    }
    if (++count % 16 == 0) world.check();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    take(data, size);
    return 0;
}

#ifndef DILOCO_LIBFUZZER
int main(int argc, char** argv) {
    EXPECT(argc == 2);
    int count = 0;
    for (const auto& entry : std::filesystem::directory_iterator(argv[1])) {
        std::ifstream file(entry.path(), std::ios::binary);
        const Bytes bytes{std::istreambuf_iterator<char>(file), {}};
        take(bytes.data(), bytes.size());
        ++count;
    }
    // Inputs that nobody has chosen.
    for (int seed = 0; seed < 200; ++seed) {
        const Bytes bytes = pattern(static_cast<size_t>(seed) * 3 + 1, seed);
        take(bytes.data(), bytes.size());
    }
    EXPECT(count >= 10);
    return passed("fuzz_link");
}
#endif
