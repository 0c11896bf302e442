use super::super::Class;
use super::*;

/// Applies a function to two arrays; the result.
fn apply<E: Copy>(builtin: Builtin, dtype: Dtype, input: &[E], inout: &[E]) -> Vec<E> {
    let mut result = inout.to_vec();
    let per_item = if matches!(builtin, Builtin::Maxloc | Builtin::Minloc) { 2 } else { 1 };
    let mut count = (input.len() / per_item) as c_int;
    let function = combine(builtin, dtype).unwrap();
    // SAFETY: two arrays of `count` items.
    unsafe {
        let input = input.as_ptr().cast_mut().cast();
        function(input, result.as_mut_ptr().cast(), &mut count, std::ptr::null_mut());
    }
    result
}

#[test]
fn there_is_a_function_where_mpi_has_none() {
    for &dtype in Dtype::ALL {
        for &builtin in Builtin::ALL.iter().filter(|builtin| builtin.allows(dtype)) {
            let is_float = matches!(dtype.class(), Class::Float | Class::Half);
            let is_needed = match builtin {
                Builtin::Minloc | Builtin::Maxloc => true,
                Builtin::Max | Builtin::Min => is_float,
                _ => dtype.class() == Class::Half,
            };
            assert!(combine(builtin, dtype).is_some() || !is_needed, "{builtin:?} of {}", dtype.name());
        }
    }
}

/// Pairs of all values of a 16-bit type with some that hit its corners.
fn grid16(some: &[u16]) -> (Vec<u16>, Vec<u16>) {
    let mut grid = (Vec::new(), Vec::new());
    for &a in some {
        for b in 0..=u16::MAX {
            grid.0.push(a);
            grid.1.push(b);
        }
    }
    grid
}

/// What an operation on floats should give, in float32.
fn scalar(builtin: Builtin, a: f32, b: f32) -> f32 {
    match builtin {
        Builtin::Sum => a + b,
        Builtin::Prod => a * b,
        Builtin::Max | Builtin::Min if a.is_nan() || b.is_nan() => f32::NAN,
        Builtin::Max => a.max(b),
        Builtin::Min => a.min(b),
        _ => unreachable!(),
    }
}

const FLOAT_OPS: [Builtin; 4] = [Builtin::Sum, Builtin::Prod, Builtin::Max, Builtin::Min];

#[test]
fn bfloat16_equals_half() {
    let (a, b) =
        grid16(&[0, 1, 0x3f80, 0x3f81, 0x4049, 0x7f7f, 0x7f80, 0x7fc0, 0x7f81, 0x8000, 0xbf80, 0xff7f]);
    for builtin in FLOAT_OPS {
        let got = apply(builtin, Dtype::Bfloat16, &a, &b);
        for (i, got) in got.into_iter().enumerate() {
            let (x, y) = (bf16::from_bits(a[i]).to_f32(), bf16::from_bits(b[i]).to_f32());
            let want = bf16::from_f32(scalar(builtin, x, y));
            let got = bf16::from_bits(got);
            assert!(got == want || (got.is_nan() && want.is_nan()), "{builtin:?} {x} {y}: {got} {want}");
        }
    }
}

#[test]
fn float16_equals_half() {
    let (a, b) =
        grid16(&[0, 1, 0x3c00, 0x3c01, 0x0400, 0x03ff, 0x7bff, 0x7c00, 0x7e00, 0x8001, 0xbc00, 0xfbff]);
    for builtin in FLOAT_OPS {
        let got = apply(builtin, Dtype::Float16, &a, &b);
        for (i, got) in got.into_iter().enumerate() {
            let (x, y) = (f16::from_bits(a[i]).to_f32(), f16::from_bits(b[i]).to_f32());
            let want = f16::from_f32(scalar(builtin, x, y));
            let got = f16::from_bits(got);
            assert!(got == want || (got.is_nan() && want.is_nan()), "{builtin:?} {x} {y}: {got} {want}");
        }
    }
}

#[test]
fn odd_lengths_and_addresses() {
    for n in [0, 1, 7, 511, 512, 513, 1025] {
        for (dtype, one, two) in [(Dtype::Float16, 0x3c00u16, 0x4000u16), (Dtype::Bfloat16, 0x3f80, 0x4000)] {
            let mut input = vec![0u8; 2 * n + 1];
            let mut inout = vec![0u8; 2 * n + 1];
            for i in 0..n {
                input[1 + 2 * i..3 + 2 * i].copy_from_slice(&one.to_ne_bytes());
                inout[1 + 2 * i..3 + 2 * i].copy_from_slice(&one.to_ne_bytes());
            }
            let mut count = n as c_int;
            // SAFETY: `n` elements from the second byte on.
            unsafe {
                let (input, inout) = (input.as_mut_ptr().add(1).cast(), inout.as_mut_ptr().add(1).cast());
                combine(Builtin::Sum, dtype).unwrap()(input, inout, &mut count, std::ptr::null_mut());
            }
            assert!(inout[1..].chunks(2).all(|bytes| bytes == two.to_ne_bytes()), "{n} {dtype:?}");
        }
    }
}

#[test]
fn floats_propagate_nan() {
    for (a, b) in [(f32::NAN, 1.0), (1.0, f32::NAN)] {
        for builtin in [Builtin::Max, Builtin::Min] {
            assert!(apply(builtin, Dtype::Float32, &[a], &[b])[0].is_nan());
        }
    }
}

#[test]
fn locations() {
    let (a, b) = ([3.0f32, 4.0, 5.0, 1.0, 2.0, 0.0], [3.0f32, 2.0, 7.0, 0.0, 1.0, 9.0]);
    assert_eq!(apply(Builtin::Maxloc, Dtype::Float32, &a, &b), [3.0, 2.0, 7.0, 0.0, 2.0, 0.0]);
    assert_eq!(apply(Builtin::Minloc, Dtype::Float32, &a, &b), [3.0, 2.0, 5.0, 1.0, 1.0, 9.0]);
    let nan = apply(Builtin::Maxloc, Dtype::Float32, &[f32::NAN, 4.0], &[1.0, 0.0]);
    assert!(nan[0].is_nan() && nan[1] == 4.0);
}
