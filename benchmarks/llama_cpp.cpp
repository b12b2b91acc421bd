// A product of llama.cpp's, timed whenever it is asked for: M rows of FP32 times an N×K weight in Q8_0.
//
//   llama_cpp N K M THREADS     prints "ready", then for every line of its input the milliseconds of one product
//
// The product runs twice, so that its threads are awake, and the second run counts. To build it, from the source of
// llama.cpp, which the source distribution of llama-cpp-python has in vendor/:
//   cmake -B build -S llama.cpp -G Ninja -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DLLAMA_BUILD_COMMON=OFF
//   ninja -C build ggml
//   g++ -O2 benchmarks/llama_cpp.cpp -I llama.cpp/ggml/include -L build/bin -Wl,-rpath,$PWD/build/bin
//       -lggml -lggml-cpu -lggml-base -o llama_cpp
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "ggml-cpu.h"
#include "ggml.h"

int main(int argc, char** argv) {
  if (argc != 5) return fprintf(stderr, "usage: llama_cpp N K M THREADS\n"), 2;
  const int64_t n = atoll(argv[1]), k = atoll(argv[2]), m = atoll(argv[3]);
  const int threads = atoi(argv[4]);
  const size_t bytes = ggml_row_size(GGML_TYPE_Q8_0, k) * n + 4 * m * (n + 2 * k) + (size_t(64) << 20);
  ggml_context* context = ggml_init({bytes, nullptr, false});
  ggml_tensor* w = ggml_new_tensor_2d(context, GGML_TYPE_Q8_0, k, n);
  ggml_tensor* x = ggml_new_tensor_2d(context, GGML_TYPE_F32, k, m);
  std::mt19937 generator(0);
  std::normal_distribution<float> normal;
  std::vector<float> row(k);
  for (auto& value : row) value = normal(generator);
  for (int64_t i = 0; i < n; i++) {
    row[i % k] = normal(generator);
    ggml_quantize_chunk(GGML_TYPE_Q8_0, row.data(), (char*)w->data + i * ggml_row_size(GGML_TYPE_Q8_0, k), 0, 1, k,
                        nullptr);
  }
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
      auto start = std::chrono::steady_clock::now();
      ggml_graph_compute(graph, &plan);
      ms = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
    }
    printf("%.4f\n", ms);
    fflush(stdout);
  }
}
