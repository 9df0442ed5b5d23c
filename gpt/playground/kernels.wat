;; The loops that take most of decoder.js's time, with SIMD: matrix-vector products, and random bits. After a change, write
;; kernels.wasm with `python -m tests.exporting.test_page_kernels`.
(module
  (memory (import "page" "memory") 1)

  ;; y[r] = w[r] · x in float32, for rows of `cols` numbers, a multiple of 8, with `skip` bytes between the rows.
  (func (export "f32") (param $w i32) (param $x i32) (param $y i32) (param $rows i32) (param $cols i32) (param $skip i32)
    (local $end i32) (local $p i32) (local $a v128) (local $b v128)
    (local.set $end (i32.add (local.get $x) (i32.shl (local.get $cols) (i32.const 2))))
    (loop $row
      (local.set $a (v128.const i32x4 0 0 0 0))
      (local.set $b (v128.const i32x4 0 0 0 0))
      (local.set $p (local.get $x))
      (loop $column
        (local.set $a (f32x4.add (local.get $a) (f32x4.mul (v128.load (local.get $w)) (v128.load (local.get $p)))))
        (local.set $b (f32x4.add (local.get $b)
          (f32x4.mul (v128.load offset=16 (local.get $w)) (v128.load offset=16 (local.get $p)))))
        (local.set $w (i32.add (local.get $w) (i32.const 32)))
        (br_if $column (i32.lt_u (local.tee $p (i32.add (local.get $p) (i32.const 32))) (local.get $end))))
      (local.set $a (f32x4.add (local.get $a) (local.get $b)))
      (f32.store (local.get $y) (f32.add
        (f32.add (f32x4.extract_lane 0 (local.get $a)) (f32x4.extract_lane 1 (local.get $a)))
        (f32.add (f32x4.extract_lane 2 (local.get $a)) (f32x4.extract_lane 3 (local.get $a)))))
      (local.set $w (i32.add (local.get $w) (local.get $skip)))
      (local.set $y (i32.add (local.get $y) (i32.const 4)))
      (br_if $row (local.tee $rows (i32.sub (local.get $rows) (i32.const 1))))))

  ;; The same for bfloat16 weights, which are the upper halves of float32 numbers.
  (func (export "bf16") (param $w i32) (param $x i32) (param $y i32) (param $rows i32) (param $cols i32)
    (local $end i32) (local $p i32) (local $a v128) (local $b v128)
    (local.set $end (i32.add (local.get $x) (i32.shl (local.get $cols) (i32.const 2))))
    (loop $row
      (local.set $a (v128.const i32x4 0 0 0 0))
      (local.set $b (v128.const i32x4 0 0 0 0))
      (local.set $p (local.get $x))
      (loop $column
        (local.set $a (f32x4.add (local.get $a) (f32x4.mul
          (i32x4.shl (v128.load16x4_u (local.get $w)) (i32.const 16)) (v128.load (local.get $p)))))
        (local.set $b (f32x4.add (local.get $b) (f32x4.mul
          (i32x4.shl (v128.load16x4_u offset=8 (local.get $w)) (i32.const 16)) (v128.load offset=16 (local.get $p)))))
        (local.set $w (i32.add (local.get $w) (i32.const 16)))
        (br_if $column (i32.lt_u (local.tee $p (i32.add (local.get $p) (i32.const 32))) (local.get $end))))
      (local.set $a (f32x4.add (local.get $a) (local.get $b)))
      (f32.store (local.get $y) (f32.add
        (f32.add (f32x4.extract_lane 0 (local.get $a)) (f32x4.extract_lane 1 (local.get $a)))
        (f32.add (f32x4.extract_lane 2 (local.get $a)) (f32x4.extract_lane 3 (local.get $a)))))
      (local.set $y (i32.add (local.get $y) (i32.const 4)))
      (br_if $row (local.tee $rows (i32.sub (local.get $rows) (i32.const 1))))))

  ;; y[r] = (w[r] · x) · scales[r] · scale for int8 weights with a scale per row, and int16 activations with one scale.
  ;; Sums are exact in int32, because decoder.js limits the activations; `cols` is a multiple of 16.
  (func (export "i8") (param $w i32) (param $x i32) (param $y i32) (param $rows i32) (param $cols i32)
    (param $scales i32) (param $scale f32)
    (local $end i32) (local $p i32) (local $a v128) (local $b v128)
    (local.set $end (i32.add (local.get $x) (i32.shl (local.get $cols) (i32.const 1))))
    (loop $row
      (local.set $a (v128.const i32x4 0 0 0 0))
      (local.set $b (v128.const i32x4 0 0 0 0))
      (local.set $p (local.get $x))
      (loop $column
        (local.set $a (i32x4.add (local.get $a)
          (i32x4.dot_i16x8_s (v128.load8x8_s (local.get $w)) (v128.load (local.get $p)))))
        (local.set $b (i32x4.add (local.get $b)
          (i32x4.dot_i16x8_s (v128.load8x8_s offset=8 (local.get $w)) (v128.load offset=16 (local.get $p)))))
        (local.set $w (i32.add (local.get $w) (i32.const 16)))
        (br_if $column (i32.lt_u (local.tee $p (i32.add (local.get $p) (i32.const 32))) (local.get $end))))
      (local.set $a (i32x4.add (local.get $a) (local.get $b)))
      (f32.store (local.get $y) (f32.mul (f32.mul (f32.load (local.get $scales)) (local.get $scale)) (f32.convert_i32_s
        (i32.add
          (i32.add (i32x4.extract_lane 0 (local.get $a)) (i32x4.extract_lane 1 (local.get $a)))
          (i32.add (i32x4.extract_lane 2 (local.get $a)) (i32x4.extract_lane 3 (local.get $a)))))))
      (local.set $y (i32.add (local.get $y) (i32.const 4)))
      (local.set $scales (i32.add (local.get $scales) (i32.const 4)))
      (br_if $row (local.tee $rows (i32.sub (local.get $rows) (i32.const 1))))))

  ;; y[i] = uniform numbers in [0, 1) in float32: the words of SplitMix64 seeded with `key`, as `gpt sample` draws them.
  (func (export "uniform") (param $key i64) (param $y i32) (param $n i32)
    (local $z i64)
    (loop $next
      (local.set $key (i64.add (local.get $key) (i64.const 0x9E3779B97F4A7C15)))
      (local.set $z (i64.mul (i64.const 0xBF58476D1CE4E5B9)
        (i64.xor (local.get $key) (i64.shr_u (local.get $key) (i64.const 30)))))
      (local.set $z (i64.mul (i64.const 0x94D049BB133111EB)
        (i64.xor (local.get $z) (i64.shr_u (local.get $z) (i64.const 27)))))
      (local.set $z (i64.xor (local.get $z) (i64.shr_u (local.get $z) (i64.const 31))))
      (f32.store (local.get $y) (f32.mul
        (f32.convert_i64_s (i64.shr_u (local.get $z) (i64.const 1))) (f32.const 0x0.FFFFFFp-63)))
      (local.set $y (i32.add (local.get $y) (i32.const 4)))
      (br_if $next (local.tee $n (i32.sub (local.get $n) (i32.const 1)))))))
