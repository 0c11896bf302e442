//! Host memory in the part of a device.

use std::alloc::{Layout, alloc_zeroed};

use super::{Device, Staging};
use crate::call::Stream;
use crate::error::Cause;

/// What is in staging memory at first: a test that reads what was not copied sees it.
const UNWRITTEN: u8 = 0xA5;

/// Host memory in the part of a device: what `Staged` does can be tested, and timed, without one.
#[derive(Clone, Copy, Debug)]
pub struct HostDevice;

impl Device for HostDevice {
    type Staging = Box<[u8]>;
    type Mark = ();

    fn allocate(&self, bytes: usize) -> Result<Self::Staging, Cause> {
        // A program may ask for more than there is. Vec would end the process.
        let too_large = || Cause::Shape { dims: [bytes as i64].into() };
        let layout = Layout::array::<u8>(bytes.max(1)).map_err(|_| too_large())?;
        // SAFETY: of a size that is not zero; the vector has what it would have allocated itself.
        let mut memory = unsafe {
            let data = alloc_zeroed(layout);
            if data.is_null() {
                return Err(too_large());
            }
            Vec::from_raw_parts(data, bytes, layout.size())
        };
        if cfg!(debug_assertions) {
            memory.fill(UNWRITTEN);
        }
        Ok(memory.into())
    }

    unsafe fn download(
        &self,
        from: *const u8,
        to: *mut u8,
        bytes: usize,
        _stream: Stream,
    ) -> Result<(), Cause> {
        if bytes > 0 {
            // SAFETY: promised by the caller.
            unsafe { to.copy_from_nonoverlapping(from, bytes) };
        }
        Ok(())
    }

    unsafe fn upload(&self, from: *const u8, to: *mut u8, bytes: usize, stream: Stream) -> Result<(), Cause> {
        // SAFETY: promised by the caller. On the host there is no difference.
        unsafe { self.download(from, to, bytes, stream) }
    }

    fn synchronize(&self, _stream: Stream) -> Result<(), Cause> {
        Ok(())
    }

    fn mark(&self, _stream: Stream) -> Result<(), Cause> {
        Ok(())
    }

    fn wait(&self, _mark: ()) -> Result<(), Cause> {
        Ok(())
    }
}

impl Staging for Box<[u8]> {
    fn data(&mut self) -> *mut u8 {
        self.as_mut_ptr()
    }

    fn capacity(&self) -> usize {
        self.len()
    }
}
