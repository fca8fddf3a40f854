//! Matrix products in f32 on a CPU.
//!
//! [`product`] takes any layout and packs what it reads anew every time. A [`Processor`] multiplies by a matrix that was packed once: with as few rows as a
//! prompt has pieces, packing takes a quarter of the time.

/// Distance in elements from one row and from one column to the next.
#[derive(Clone, Copy)]
pub(crate) struct Matrix {
    row: usize,
    column: usize,
}

impl Matrix {
    /// Rows of which each `stride` elements begin.
    pub(crate) fn rows(stride: usize) -> Matrix {
        Matrix { row: stride, column: 1 }
    }

    pub(crate) fn turned(self) -> Matrix {
        Matrix { row: self.column, column: self.row }
    }

    /// Elements that a slice must have to hold this many rows and columns.
    fn span(self, rows: usize, columns: usize) -> usize {
        (rows - 1) * self.row + (columns - 1) * self.column + 1
    }
}

/// `c` = `scale` a b, or with `add` c + `scale` a b, for shapes [m, k, n]; nothing where one of them is zero.
#[expect(clippy::too_many_arguments, reason = "three matrices in the two orders that they may have")]
pub(crate) fn product(c: &mut [f32], c_as: Matrix, [m, k, n]: [usize; 3], a: &[f32], a_as: Matrix, b: &[f32], b_as: Matrix, scale: f32, add: bool) {
    if m * k * n == 0 {
        return;
    }
    assert!(c.len() >= c_as.span(m, n) && a.len() >= a_as.span(m, k) && b.len() >= b_as.span(k, n), "a matrix is shorter than its shape");
    let [c_as, a_as, b_as] = [c_as, a_as, b_as].map(|matrix| (matrix.column as isize, matrix.row as isize));
    // SAFETY: every element that the shapes and strides reach lies within the slices, as asserted, and `c` overlaps neither of the others.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            c.as_mut_ptr(),
            c_as.0,
            c_as.1,
            add,
            a.as_ptr(),
            a_as.0,
            a_as.1,
            b.as_ptr(),
            b_as.0,
            b_as.1,
            1.0,
            scale,
            false,
            false,
            false,
            gemm::Parallelism::None,
        );
    }
}

/// Rows that begin each `stride` elements.
#[derive(Clone, Copy)]
pub(super) struct Rows<'a> {
    pub(super) values: &'a [f32],
    pub(super) stride: usize,
}

/// Runs code in the widest instructions that the processor was seen to have, and packs matrices for it: panels of some columns, one panel after the
/// other, each row by row. The last panel is filled up with zeros.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Processor(Instructions);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Instructions {
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// `gemm`'s kernels, whatever it finds, and loops for any processor of this kind.
    Any,
}

impl Processor {
    /// What serves best. Without optimisation that is `gemm`, which is optimised always.
    pub(super) fn detect() -> Processor {
        if cfg!(debug_assertions) { Processor(Instructions::Any) } else { Processor::all()[0] }
    }

    /// Every way this processor knows, the fastest first.
    pub(super) fn all() -> Vec<Processor> {
        let mut all = vec![Processor(Instructions::Any)];
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                all.insert(0, Processor(Instructions::Avx2));
                if is_x86_feature_detected!("avx512f") {
                    all.insert(0, Processor(Instructions::Avx512));
                }
            }
        }
        all
    }

    /// Columns of a panel of a matrix that has this many.
    pub(super) fn width(self, columns: usize) -> usize {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Instructions::Avx512 => 32,
            #[cfg(target_arch = "x86_64")]
            Instructions::Avx2 => 16,
            Instructions::Any => columns,
        }
    }

    /// Packs the matrix whose elements `at` names by row and column.
    pub(super) fn pack(self, into: &mut Vec<f32>, rows: usize, columns: usize, at: impl Fn(usize, usize) -> f32) {
        let width = self.width(columns);
        into.clear();
        into.resize(columns.next_multiple_of(width) * rows, 0.0);
        for (first, panel) in (0..columns).step_by(width).zip(into.chunks_exact_mut(rows * width)) {
            for (row, values) in panel.chunks_exact_mut(width).enumerate() {
                for (column, value) in (first..columns).zip(values) {
                    *value = at(row, column);
                }
            }
        }
    }

    /// `y` = x b, or y + x b where `add` is set, for shapes [m, k, n] and `b` as packed. Rows of `y` begin each `stride` elements.
    pub(super) fn multiply(self, y: &mut [f32], stride: usize, shape: [usize; 3], x: Rows, b: &[f32], add: bool) {
        match self.0 {
            // SAFETY, here and below: a value of this kind is made only where these features were seen.
            #[cfg(target_arch = "x86_64")]
            Instructions::Avx512 => unsafe { multiply_avx512(y, stride, shape, x, b, add) },
            #[cfg(target_arch = "x86_64")]
            Instructions::Avx2 => unsafe { multiply_avx2(y, stride, shape, x, b, add) },
            Instructions::Any => product(y, Matrix::rows(stride), shape, x.values, Matrix::rows(x.stride), b, Matrix::rows(shape[2]), 1.0, add),
        }
    }

    /// Runs loops, all of whose calls are inlined.
    #[inline(always)]
    pub(super) fn run(self, loops: impl FnOnce()) {
        match self.0 {
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Instructions::Avx512 => unsafe { run_avx512(loops) },
            #[cfg(target_arch = "x86_64")]
            Instructions::Avx2 => unsafe { run_avx2(loops) },
            Instructions::Any => loops(),
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx2,fma")]
fn run_avx512(loops: impl FnOnce()) {
    loops();
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn run_avx2(loops: impl FnOnce()) {
    loops();
}

/// Rows and depth of a block: of `x`, what fits into the second cache, and of a panel, what fits into the first.
#[cfg(target_arch = "x86_64")]
const BLOCK: [usize; 2] = [96, 384];

/// Writes `$multiply`, which works as [`Processor::multiply`] does, in tiles of up to six rows by two vectors that stay in registers: twelve sums hide the
/// latency of an addition. The compiler is told the instructions, because whether it finds them in plain loops depends on trifles.
#[cfg(target_arch = "x86_64")]
macro_rules! multiply_in_tiles {
    ($multiply:ident, $features:literal, $lanes:literal, $zero:ident, $splat:ident, $load:ident, $multiply_add:ident, $add:ident, $store:ident) => {
        #[target_feature(enable = $features)]
        fn $multiply(y: &mut [f32], stride: usize, [m, k, n]: [usize; 3], x: Rows, b: &[f32], add: bool) {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch, $add, $load, $multiply_add, $splat, $store, $zero};

            const WIDTH: usize = 2 * $lanes;

            /// `y` = the rows of `x` times a panel. Meanwhile the memory from `next` on is fetched into the cache, `step` bytes for each row of the panel.
            #[target_feature(enable = $features)]
            #[expect(clippy::too_many_arguments, reason = "a product, and what to fetch meanwhile")]
            fn tile<const ROWS: usize>(
                y: &mut [f32],
                stride: usize,
                columns: usize,
                x: Rows,
                panel: &[[f32; WIDTH]],
                add: bool,
                mut next: *const i8,
                step: usize,
            ) {
                assert!(x.values.len() >= (ROWS - 1) * x.stride + panel.len(), "a matrix is shorter than its shape");
                let mut at = x.values.as_ptr();
                let mut sums = [[$zero(); 2]; ROWS];
                for b in panel {
                    _mm_prefetch::<_MM_HINT_T0>(next);
                    next = next.wrapping_add(step);
                    // SAFETY: a row of a panel is two vectors long.
                    let b = unsafe { [$load(b.as_ptr()), $load(b[$lanes..].as_ptr())] };
                    for row in 0..ROWS {
                        // SAFETY: as asserted.
                        let x = $splat(unsafe { *at.add(row * x.stride) });
                        sums[row] = [$multiply_add(x, b[0], sums[row][0]), $multiply_add(x, b[1], sums[row][1])];
                    }
                    at = at.wrapping_add(1);
                }
                for (row, sums) in sums.into_iter().enumerate() {
                    let y = &mut y[row * stride..];
                    // The last panel may be wider than what is left of the row.
                    let mut narrow = [0.0; WIDTH];
                    let to = if columns < WIDTH {
                        narrow[..columns].copy_from_slice(&y[..columns]);
                        &mut narrow
                    } else {
                        &mut y[..WIDTH]
                    };
                    let low = to.as_mut_ptr();
                    let high = low.wrapping_add($lanes);
                    // SAFETY: `to` is two vectors long.
                    unsafe {
                        let [before, after] = if add { [$load(low), $load(high)] } else { [$zero(); 2] };
                        $store(low, $add(before, sums[0]));
                        $store(high, $add(after, sums[1]));
                    }
                    if columns < WIDTH {
                        y[..columns].copy_from_slice(&narrow[..columns]);
                    }
                }
            }

            assert!(b.len() >= k * n.next_multiple_of(WIDTH), "a matrix is shorter than its shape");
            for depth in (0..k).step_by(BLOCK[1]) {
                let end = k.min(depth + BLOCK[1]);
                for block in (0..m).step_by(BLOCK[0]) {
                    let last = m.min(block + BLOCK[0]);
                    for (first, panel) in (0..n).step_by(WIDTH).zip(b.chunks_exact(k * WIDTH)) {
                        // The next panel comes into the cache while this one is used.
                        let step = 4 * WIDTH / (last - block).div_ceil(6);
                        let mut next = panel[depth * WIDTH..].as_ptr().wrapping_add(k * WIDTH).cast::<i8>();
                        let panel = &panel.as_chunks::<WIDTH>().0[depth..end];
                        let mut row = block;
                        while row < last {
                            // As even as possible: a tile of two rows takes as long as one of four.
                            let rows = (last - row).div_ceil((last - row).div_ceil(6));
                            let x = Rows { values: &x.values[row * x.stride + depth..], ..x };
                            let y = &mut y[row * stride + first..];
                            let add = add || depth > 0;
                            match rows {
                                1 => tile::<1>(y, stride, n - first, x, panel, add, next, step),
                                2 => tile::<2>(y, stride, n - first, x, panel, add, next, step),
                                3 => tile::<3>(y, stride, n - first, x, panel, add, next, step),
                                4 => tile::<4>(y, stride, n - first, x, panel, add, next, step),
                                5 => tile::<5>(y, stride, n - first, x, panel, add, next, step),
                                _ => tile::<6>(y, stride, n - first, x, panel, add, next, step),
                            }
                            next = next.wrapping_add(step * (end - depth));
                            row += rows;
                        }
                    }
                }
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
multiply_in_tiles!(
    multiply_avx2,
    "avx2,fma",
    8,
    _mm256_setzero_ps,
    _mm256_set1_ps,
    _mm256_loadu_ps,
    _mm256_fmadd_ps,
    _mm256_add_ps,
    _mm256_storeu_ps
);
#[cfg(target_arch = "x86_64")]
multiply_in_tiles!(
    multiply_avx512,
    "avx512f,avx2,fma",
    16,
    _mm512_setzero_ps,
    _mm512_set1_ps,
    _mm512_loadu_ps,
    _mm512_fmadd_ps,
    _mm512_add_ps,
    _mm512_storeu_ps
);

#[cfg(test)]
mod tests {
    use super::*;

    /// Whole numbers, so that every order of addition gives the same sum.
    fn whole(size: usize, seed: usize) -> Vec<f32> {
        (0..size).map(|index| ((index * 7919 + seed) % 17) as f32 - 8.0).collect()
    }

    #[test]
    fn every_processor_multiplies_matrices_of_any_shape() {
        for processor in Processor::all() {
            for m in [1, 2, 3, 4, 5, 6, 7, 12, 13, 97] {
                for (k, n) in [(1, 1), (4, 12), (31, 16), (32, 17), (3, 64), (385, 33), (800, 5)] {
                    // Rows of x and y are longer than what is used of them.
                    let (x_stride, y_stride) = (k + 3, n + 2);
                    let (x, b, before) = (whole(m * x_stride, 1), whole(k * n, 2), whole(m * y_stride, 3));
                    let mut packed = Vec::new();
                    processor.pack(&mut packed, k, n, |row, column| b[row * n + column]);
                    for add in [false, true] {
                        let mut y = before.clone();
                        processor.multiply(&mut y, y_stride, [m, k, n], Rows { values: &x, stride: x_stride }, &packed, add);
                        let mut expected = before.clone();
                        for row in 0..m {
                            for column in 0..n {
                                let sum: f32 = (0..k).map(|depth| x[row * x_stride + depth] * b[depth * n + column]).sum();
                                let y = &mut expected[row * y_stride + column];
                                *y = if add { *y + sum } else { sum };
                            }
                        }
                        assert!(y == expected, "{processor:?} {:?} add {add}", [m, k, n]);
                    }
                }
            }
        }
    }
}
