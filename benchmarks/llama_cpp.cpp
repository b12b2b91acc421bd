// A product of llama.cpp's, timed whenever it is asked for: M rows of FP32 times an N×K weight in one of its types.
//
//   llama_cpp N K M THREADS [TYPE [repack]]     prints "ready", then for every line of its input the milliseconds
//
// TYPE is q8_0, the default, q4_0, mxfp4 or another of ggml's. With repack the weight lies in the order that llama.cpp
// gives it on this CPU when it loads a model, where it has one for the type.
//
// The product runs twice, so that its threads are awake, and the second run counts; with one thread by the time of
// that thread. To build it, from the source of llama.cpp, which the source distribution of llama-cpp-python has in
// vendor/:
//   cmake -B build -S llama.cpp -G Ninja -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DLLAMA_BUILD_COMMON=OFF
//   ninja -C build ggml
//   g++ -O2 benchmarks/llama_cpp.cpp -I llama.cpp/ggml/include -L build/bin -Wl,-rpath,$PWD/build/bin
//       -lggml -lggml-cpu -lggml-base -o llama_cpp
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <random>
#include <vector>

#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"

static ggml_type type_named(const char* word) {
  for (int type = 0; type < GGML_TYPE_COUNT; type++) {
    const char* name = ggml_type_name(ggml_type(type));
    if (name && !strcmp(name, word)) return ggml_type(type);
  }
  exit((fprintf(stderr, "ggml has no type %s\n", word), 2));
}

// The memory in which this CPU's own order of weights lies, or ordinary memory where it has none.
static ggml_backend_buffer_type_t repacking() {
  ggml_backend_dev_t cpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
  auto others = (ggml_backend_dev_get_extra_bufts_t)ggml_backend_reg_get_proc_address(
      ggml_backend_dev_backend_reg(cpu), "ggml_backend_dev_get_extra_bufts");
  ggml_backend_buffer_type_t* each = others ? others(cpu) : nullptr;
  return each && *each ? *each : ggml_backend_cpu_buffer_type();
}

static double now_ms(int threads) {
  timespec time;
  clock_gettime(threads == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC, &time);
  return 1e3 * time.tv_sec + 1e-6 * time.tv_nsec;
}

int main(int argc, char** argv) {
  if (argc < 5 || argc > 7) return fprintf(stderr, "usage: llama_cpp N K M THREADS [TYPE [repack]]\n"), 2;
  const int64_t n = atoll(argv[1]), k = atoll(argv[2]), m = atoll(argv[3]);
  const int threads = atoi(argv[4]);
  const ggml_type type = type_named(argc > 5 ? argv[5] : "q8_0");
  ggml_context* weights = ggml_init({2 * ggml_tensor_overhead(), nullptr, true});
  ggml_tensor* w = ggml_new_tensor_2d(weights, type, k, n);
  ggml_backend_alloc_ctx_tensors_from_buft(weights, argc > 6 ? repacking() : ggml_backend_cpu_buffer_type());
  ggml_context* context = ggml_init({4 * m * (n + 2 * k) + (size_t(64) << 20), nullptr, false});
  ggml_tensor* x = ggml_new_tensor_2d(context, GGML_TYPE_F32, k, m);
  std::mt19937 generator(0);
  std::normal_distribution<float> normal;
  std::vector<float> row(k);
  std::vector<char> codes(ggml_row_size(type, k) * n);
  for (auto& value : row) value = normal(generator);
  for (int64_t i = 0; i < n; i++) {
    row[i % k] = normal(generator);
    ggml_quantize_chunk(type, row.data(), codes.data() + i * ggml_row_size(type, k), 0, 1, k, nullptr);
  }
  ggml_backend_tensor_set(w, codes.data(), 0, codes.size());
  for (int64_t i = 0; i < k * m; i++) ((float*)x->data)[i] = normal(generator);
  ggml_cgraph* graph = ggml_new_graph(context);
  ggml_build_forward_expand(graph, ggml_mul_mat(context, w, x));
  ggml_cplan plan = ggml_graph_plan(graph, threads, nullptr);
  std::vector<uint8_t> work(plan.work_size);
  plan.work_data = work.data();
  puts("ready");
  fflush(stdout);
  char line[64];
  while (fgets(line, sizeof line, stdin)) {
    double ms = 0;
    for (int i = 0; i < 2; i++) {
      const double start = now_ms(threads);
      ggml_graph_compute(graph, &plan);
      ms = now_ms(threads) - start;
    }
    printf("%.4f\n", ms);
    fflush(stdout);
  }
}
