// cblas_sgemm with the bits of the reference BLAS that MLX's Linux CPU build ships, several times as fast. products.py says why.
//
// There each element of C is one sum in the order of k, and a product is rounded before it is added. Here a few rows of sixteen
// columns are summed side by side: no element's order changes. Compiled with -ffp-contract=off, so that nothing is fused.

#include <vector>

namespace {

constexpr long LANES = 8, WIDE = 2 * LANES;
typedef float Vec __attribute__((vector_size(4 * LANES), aligned(4)));

// C [m, n] = alpha A [m, k] B [k, n] + beta C, row by row in memory.
struct Product {
  bool a_is_transposed, b_is_transposed;
  long m, n, k;
  float alpha, beta;
  const float *a, *b;
  float *c;
  long lda, ldb, ldc;
  std::vector<float> panel;

  // Columns n0 to n0 + width of B as [k, WIDE], zeros beyond them.
  void pack(long n0, long width) {
    float *to = panel.data();
    long l0 = 0;
    if (b_is_transposed && width == WIDE)
      for (; l0 + 4 <= k; l0 += 4)
        for (long j = 0; j < WIDE; j += LANES) four(b + (n0 + j) * ldb + l0, to + l0 * WIDE + j);
    for (long l = l0; l < k; l++)
      for (long j = 0; j < WIDE; j++)
        to[l * WIDE + j] = j >= width ? 0 : b_is_transposed ? b[(n0 + j) * ldb + l] : b[l * ldb + n0 + j];
  }

  // Four elements of LANES rows of a transposed B become LANES elements of four rows.
  void four(const float *from, float *to) const {
    Vec r[4];
    for (int i = 0; i < 4; i++) {
      const float *x = from + i * ldb, *y = x + 4 * ldb;
      r[i] = Vec{x[0], x[1], x[2], x[3], y[0], y[1], y[2], y[3]};
    }
    const Vec a02 = __builtin_shufflevector(r[0], r[2], 0, 8, 1, 9, 4, 12, 5, 13);
    const Vec b02 = __builtin_shufflevector(r[0], r[2], 2, 10, 3, 11, 6, 14, 7, 15);
    const Vec a13 = __builtin_shufflevector(r[1], r[3], 0, 8, 1, 9, 4, 12, 5, 13);
    const Vec b13 = __builtin_shufflevector(r[1], r[3], 2, 10, 3, 11, 6, 14, 7, 15);
    *(Vec *)to = __builtin_shufflevector(a02, a13, 0, 8, 1, 9, 4, 12, 5, 13);
    *(Vec *)(to + WIDE) = __builtin_shufflevector(a02, a13, 2, 10, 3, 11, 6, 14, 7, 15);
    *(Vec *)(to + 2 * WIDE) = __builtin_shufflevector(b02, b13, 0, 8, 1, 9, 4, 12, 5, 13);
    *(Vec *)(to + 3 * WIDE) = __builtin_shufflevector(b02, b13, 2, 10, 3, 11, 6, 14, 7, 15);
  }

  // The reference scales A and begins with beta C where B lies as it is; where B is transposed, it scales the finished sum.
  template <int ROWS>
  void rows(long m0, long n0, long width) const {
    const long row_step = a_is_transposed ? 1 : lda, k_step = a_is_transposed ? lda : 1;
    const float first = b_is_transposed ? 1 : alpha;
    Vec sum[ROWS][2] = {};
    for (int r = 0; r < ROWS && !b_is_transposed && beta != 0; r++)
      for (long j = 0; j < width; j++) sum[r][j / LANES][j % LANES] = beta * c[(m0 + r) * ldc + n0 + j];
    const float *from = a + m0 * row_step;
    for (long l = 0; l < k; l++) {
      const Vec left = *(const Vec *)&panel[l * WIDE], right = *(const Vec *)&panel[l * WIDE + LANES];
      for (int r = 0; r < ROWS; r++) {
        const float scaled = first * from[r * row_step + l * k_step];
        sum[r][0] += scaled * left;
        sum[r][1] += scaled * right;
      }
    }
    for (int r = 0; r < ROWS; r++)
      for (long j = 0; j < width; j++) {
        float &to = c[(m0 + r) * ldc + n0 + j];
        const float one = sum[r][j / LANES][j % LANES];
        to = !b_is_transposed ? one : beta == 0 ? alpha * one : alpha * one + beta * to;
      }
  }

  void run() {
    if (alpha == 0) k = 0;
    if (k == 0) b_is_transposed = false;
    panel.resize(k * WIDE);
    for (long n0 = 0; n0 < n; n0 += WIDE) {
      const long width = n - n0 < WIDE ? n - n0 : WIDE;
      pack(n0, width);
      long m0 = 0;
      for (; m0 + 4 <= m; m0 += 4) rows<4>(m0, n0, width);
      for (; m0 < m; m0++) rows<1>(m0, n0, width);
    }
  }
};

}  // namespace

// How many this process has made.
extern "C" long products_made = 0;

// The orders and transpositions are cblas.h's numbers: 101 row by row; 111 as it is.
extern "C" void cblas_sgemm(
    int order, int ta, int tb, int m, int n, int k, float alpha, const float *a, int lda, const float *b, int ldb, float beta,
    float *c, int ldc) {
  products_made++;
  if (order == 101)
    Product{ta != 111, tb != 111, m, n, k, alpha, beta, a, b, c, lda, ldb, ldc, {}}.run();
  else
    Product{tb != 111, ta != 111, n, m, k, alpha, beta, b, a, c, ldb, lda, ldc, {}}.run();
}
