//! Buffers: the memory of one operand or result.

use super::Dtype;

/// Memory of one operand or result. Its elements can be read and written until the call that it was made for has
/// ended, or, of a request, until that has been waited for.
#[derive(Clone, Copy, Debug)]
pub struct Buffer {
    data: *mut u8,
    dtype: Dtype,
    count: usize,
}

impl Buffer {
    /// # Safety
    /// `data` points to `count` elements, which stay where they are as long as the type promises.
    /// Elements of an operand are only written where the program allows it.
    pub const unsafe fn new(data: *mut u8, dtype: Dtype, count: usize) -> Self {
        Self { data, dtype, count }
    }

    #[inline(always)]
    pub fn data(&self) -> *mut u8 {
        self.data
    }

    #[inline(always)]
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// In elements.
    #[inline(always)]
    pub fn count(&self) -> usize {
        self.count
    }

    pub fn bytes(&self) -> usize {
        self.count * self.dtype.size()
    }

    /// Some of its elements.
    ///
    /// # Panics
    /// If they are not in it.
    pub fn part(&self, start: usize, count: usize) -> Self {
        assert!(start.checked_add(count).is_some_and(|end| end <= self.count), "elements beyond a buffer");
        Self { data: self.data.wrapping_add(start * self.dtype.size()), count, ..*self }
    }

    /// Memory of the same size elsewhere.
    ///
    /// # Safety
    /// As for [`new`](Self::new).
    pub unsafe fn moved_to(&self, data: *mut u8) -> Self {
        Self { data, ..*self }
    }

    /// These elements outside of the memory of another buffer: in `copy`, if the two share some.
    pub fn apart_from(&self, other: &Self, copy: &mut Vec<u8>) -> Self {
        if !self.overlaps(other) {
            return *self;
        }
        // SAFETY: a buffer's elements can be read, and the copy has as many bytes.
        unsafe {
            copy.extend_from_slice(std::slice::from_raw_parts(self.data, self.bytes()));
            self.moved_to(copy.as_mut_ptr())
        }
    }

    /// Whether the two share memory.
    pub fn overlaps(&self, other: &Buffer) -> bool {
        let (a, b) = (self.data as usize, other.data as usize);
        a < b + other.bytes() && b < a + self.bytes()
    }
}
