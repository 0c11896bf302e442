//! Memory of an operand or a result.

use super::Dtype;

/// Memory of one operand or result.
#[derive(Clone, Copy, Debug)]
pub struct Buffer {
    pub data: *mut u8,
    pub dtype: Dtype,
    /// In elements.
    pub count: usize,
}

impl Buffer {
    pub fn bytes(&self) -> usize {
        self.count * self.dtype.size()
    }

    /// Whether the two share memory.
    pub fn overlaps(&self, other: &Buffer) -> bool {
        let (a, b) = (self.data as usize, other.data as usize);
        a < b + other.bytes() && b < a + self.bytes()
    }
}
