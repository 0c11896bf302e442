//! MPI, on arrays in the memory of the host.

use super::{Base, Descriptor, Transport, mpi};
use crate::call::{Call, Stream};
use crate::device::{Device, Platform};
use crate::error::{Cause, Error};
use crate::ops::Buffer;

pub const DESCRIPTOR: Descriptor = Descriptor {
    name: "mpi",
    takes: |platform| platform == Platform::Cpu,
    default_on: Some(Platform::Cpu),
    start: |_| Ok(HostMpi::default().into()),
    ..Descriptor::DEFAULT
};

/// MPI, on arrays in the memory of the host.
#[derive(Debug)]
pub struct HostMpi(Base);

impl Default for HostMpi {
    fn default() -> Self {
        Self(Base::new(DESCRIPTOR.name, Device::Host))
    }
}

impl Transport for HostMpi {
    fn base(&self) -> &Base {
        &self.0
    }

    #[inline]
    fn execute(&self, call: &Call) -> Result<(), Error> {
        mpi::execute(call).map_err(|cause| call.site.error(cause))
    }

    /// Without a copy in between.
    #[inline]
    fn read_numbers(&self, numbers: &Buffer, into: &mut [i32], _: Stream) -> Result<(), Cause> {
        let bytes = size_of_val(into).min(numbers.bytes());
        // SAFETY: the buffer has this number of bytes, in host memory.
        unsafe { numbers.data().copy_to_nonoverlapping(into.as_mut_ptr().cast(), bytes) };
        Ok(())
    }
}
