// The program of `emulated.py`: reads a call's arguments, calls, writes what the arguments point to.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <vector>

struct Buffer {
  char* bytes;
  int64_t size;
};

static int64_t number() {
  int64_t value;
  if (fread(&value, 8, 1, stdin) != 1) exit(3);
  return value;
}

int main(int, char** words) {
  const std::map<std::string, void*> functions = {FUNCTIONS};
  std::vector<Buffer> buffers;
  auto pointer = [&buffers]() -> int64_t {
    int64_t size = number();
    if (size < 0) return 0;
    char* bytes = static_cast<char*>(aligned_alloc(64, (size + 64) / 64 * 64));
    if (size && fread(bytes, size, 1, stdin) != 1) exit(3);
    buffers.push_back({bytes, size});
    return reinterpret_cast<int64_t>(bytes);
  };
  float factor = 0;
  int64_t values[20] = {}, fields[20][4], count = 0;
  for (int64_t left = number(); left > 0; left--) {
    int64_t kind = number();
    if (kind < 0) {
      int64_t bits = number();
      std::memcpy(&factor, &bits, 4);
    } else if (kind == 0) {
      values[count++] = number();
    } else if (kind == 1) {
      values[count++] = pointer();
    } else {  // a structure of more than 16 bytes is passed by its address
      for (int64_t i = 0; i < kind; i++) fields[count][i] = pointer();
      values[count] = reinterpret_cast<int64_t>(fields[count]);
      count++;
    }
  }
  const int64_t* v = values;
  using I = int64_t;
  using Function = I (*)(I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, float);
  int64_t result = reinterpret_cast<Function>(functions.at(words[1]))(
      v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7], v[8], v[9], v[10], v[11], v[12], v[13], v[14], v[15],
      v[16], v[17], v[18], v[19], factor);
  fwrite(&result, 8, 1, stdout);
  for (const Buffer& buffer : buffers) fwrite(buffer.bytes, 1, buffer.size, stdout);
}
