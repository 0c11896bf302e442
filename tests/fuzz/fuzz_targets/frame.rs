//! XLA's call frames: `make fuzz`.

#![no_main]

#[path = "../../tests/rust/frames.rs"]
mod frames;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    frames::decode(bytes);
});
