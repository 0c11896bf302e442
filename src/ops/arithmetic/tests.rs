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
            let is_needed = match (builtin, dtype.class()) {
                (Builtin::Minloc | Builtin::Maxloc, _) => true,
                (Builtin::Max | Builtin::Min, Class::Float | Class::Half) => true,
                (Builtin::Sum | Builtin::Prod, Class::Half) => true,
                (Builtin::Sum | Builtin::Prod, Class::Integer) => dtype.size() <= 2,
                _ => false,
            };
            assert_eq!(combine(builtin, dtype).is_some(), is_needed, "{builtin:?} of {}", dtype.name());
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
        _ => unreachable!(),
    }
}

const FLOAT_OPS: [Builtin; 2] = [Builtin::Sum, Builtin::Prod];

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
fn narrow_integers_wrap() {
    for n in [1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 513] {
        assert_eq!(apply(Builtin::Sum, Dtype::Int8, &vec![100i8; n], &vec![100; n]), vec![-56; n]);
        assert_eq!(apply(Builtin::Sum, Dtype::Uint8, &vec![200u8; n], &vec![100; n]), vec![44; n]);
        assert_eq!(apply(Builtin::Prod, Dtype::Int8, &vec![100i8; n], &vec![3; n]), vec![44; n]);
        assert_eq!(apply(Builtin::Sum, Dtype::Int16, &vec![i16::MIN; n], &vec![-1; n]), vec![i16::MAX; n]);
        assert_eq!(apply(Builtin::Prod, Dtype::Uint16, &vec![257u16; n], &vec![256; n]), vec![256; n]);
    }
}

/// The bits of floats in the order of MAX: what comes later wins. NaN of both signs win over all others.
const ASCENDING: [u32; 14] = [
    0xff80_0000, // -inf
    0xff7f_ffff,
    0xbf80_0000,
    0x8080_0000, // the largest negative normal number
    0x807f_ffff, // denormals
    0x8000_0001,
    0x8000_0000, // -0
    0,
    1, // denormals
    0x007f_ffff,
    0x0080_0000,
    0x3f80_0000,
    0x7f7f_ffff,
    0x7f80_0000, // inf
];
const NANS: [u32; 4] = [0x7f80_0001, 0x7fc0_0000, 0xffc0_0000, 0xffff_ffff];

#[test]
fn extrema_of_floats_are_exact_and_commute() {
    let all = [&ASCENDING[..], &NANS[..]].concat();
    let order = |bits: &u32| all.iter().position(|it| it == bits).unwrap();
    for (i, a) in all.iter().enumerate() {
        for (j, b) in all.iter().enumerate() {
            for (builtin, first) in [(Builtin::Max, i.max(j)), (Builtin::Min, i.min(j))] {
                let got = apply(builtin, Dtype::Float32, &[*a], &[*b])[0];
                assert_eq!(got, apply(builtin, Dtype::Float32, &[*b], &[*a])[0], "{builtin:?} {a:x} {b:x}");
                let is_nan = i.max(j) >= ASCENDING.len();
                let is_right = if is_nan { order(&got) >= ASCENDING.len() } else { got == all[first] };
                assert!(is_right, "{builtin:?} {a:x} {b:x}: {got:x}");
            }
        }
    }
}

#[test]
fn all_floats_have_the_same_order() {
    let pairs: Vec<(f32, f32)> = (0..0x1_0000u32)
        .step_by(97)
        .flat_map(|a| [0, 1, 0x3f80, 0x8000, 0x8001, 0x7f80].map(|b| (a, b)))
        .map(|(a, b)| (f32::from_bits(a << 16), f32::from_bits(b << 16)))
        .filter(|(a, _)| !a.is_nan())
        .collect();
    for (a, b) in pairs {
        for builtin in [Builtin::Max, Builtin::Min] {
            let single = apply(builtin, Dtype::Float32, &[a], &[b])[0];
            let double = apply(builtin, Dtype::Float64, &[f64::from(a)], &[f64::from(b)])[0];
            let [half, other] = [a, b].map(bf16::from_f32);
            let half = apply(builtin, Dtype::Bfloat16, &[half], &[other])[0];
            assert_eq!(
                (f64::from(single).to_bits(), half.to_f32().to_bits()),
                (double.to_bits(), single.to_bits())
            );
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
    // Zeros of both signs are equal, and all NaN; denormals differ.
    for (a, b) in [(-0.0, 0.0), (0.0, -0.0), (f32::NAN, -f32::NAN), (-f32::NAN, f32::NAN)] {
        for builtin in [Builtin::Maxloc, Builtin::Minloc] {
            assert_eq!(apply(builtin, Dtype::Float32, &[a, 3.0], &[b, 5.0])[1], 3.0, "{builtin:?} {a} {b}");
        }
    }
    let [one, two] = [1, 2].map(f32::from_bits);
    assert_eq!(apply(Builtin::Maxloc, Dtype::Float32, &[two, 9.0], &[one, 4.0]), [two, 9.0]);
    assert_eq!(apply(Builtin::Minloc, Dtype::Float32, &[-two, 9.0], &[-one, 4.0]), [-two, 9.0]);
}
