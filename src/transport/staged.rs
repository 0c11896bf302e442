//! Transports for host memory, applied to the memory of a device.
//!
//! Everything that is started on a stream of XLA's happens in order there, so results need not have arrived
//! in the device's memory when a call returns: what follows on the stream waits for them. A large reduction
//! or broadcast goes in pieces, so that one piece is communicated while others are copied.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use super::Transport;
use super::pool::{Lease, Pool};
use crate::call::{Call, Stream};
use crate::comm::Comm;
use crate::device::Device;
use crate::error::{Cause, Error};
use crate::ops::Buffer;

/// Bytes of a piece. Not a setting: all ranks have to cut alike.
const PIECE: usize = 4 << 20;

/// Runs the calls of a device on a transport for host memory.
///
/// Written once for all operations: what an operation reads is what its call has as `send`, what it
/// writes is `recv`, and no more than that is copied.
#[derive(Debug)]
pub struct Staged<T> {
    name: &'static str,
    device: Device,
    host: T,
    piece: usize,
    pool: Pool,
}

impl<T: Transport> Staged<T> {
    pub fn new(name: &'static str, device: Device, host: T) -> Self {
        Self::with_pieces(name, device, host, PIECE)
    }

    /// With pieces of so many bytes.
    pub fn with_pieces(name: &'static str, device: Device, host: T, piece: usize) -> Self {
        Self { name, device, host, piece, pool: Pool::new(device) }
    }

    /// The call on staging memory, between the copies.
    fn run(&self, call: &Call) -> Result<Result<(), Error>, Cause> {
        let stream = call.stream;
        let lease =
            |buffer: Option<Buffer>| buffer.map(|buffer| self.pool.lease(buffer.bytes(), stream)).transpose();
        let (mut down, mut up, mut learnt) = (lease(call.send)?, lease(call.recv)?, lease(call.received)?);
        let on_host = |buffer: Option<Buffer>, staging: &Option<Lease>| {
            // SAFETY: as many bytes were leased.
            buffer.zip(staging.as_ref()).map(|(buffer, lease)| unsafe { buffer.moved_to(lease.data()) })
        };
        let (send, recv) = (on_host(call.send, &down), on_host(call.recv, &up));
        let received = on_host(call.received, &learnt);
        let pieces = pieces(call, self.piece);

        if call.send.is_none() && call.recv.is_none() {
            // A rank has come to a barrier when its stream has.
            self.device.synchronize(stream)?;
        }
        let mut marks = VecDeque::new();
        if let (Some(from), Some(to)) = (call.send, send) {
            for range in &pieces {
                let (from, to) = (part(&from, range), part(&to, range));
                // SAFETY: the staging buffer is at least as large, and goes back to the pool when the copies
                // have ended: they have when their marks were waited for.
                unsafe { self.device.download(from.data(), to.data(), from.bytes(), stream)? };
                marks.push_back(self.device.mark(stream)?);
            }
        }
        for range in &pieces {
            if let Some(Some(mark)) = marks.pop_front() {
                mark.wait()?;
            }
            let [send_part, recv_part] = [send, recv].map(|buffer| buffer.map(|buffer| part(&buffer, range)));
            let host_call = Call { send: send_part, recv: recv_part, received, ..call.clone() };
            if let Err(error) = self.host.execute(&host_call) {
                self.device.synchronize(stream)?;
                [&mut down, &mut up, &mut learnt]
                    .into_iter()
                    .flatten()
                    .for_each(|lease| lease.settled = true);
                return Ok(Err(error));
            }
            if let (Some(from), Some(to)) = (recv_part, call.recv) {
                let to = part(&to, range);
                // SAFETY: as above; the lease is busy until the copy has ended.
                unsafe { self.device.upload(from.data(), to.data(), to.bytes(), stream)? };
            }
        }
        if let (Some(from), Some(to)) = (received, call.received) {
            // SAFETY: as above.
            unsafe { self.device.upload(from.data(), to.data(), to.bytes(), stream)? };
        }
        // What was copied down has been waited for.
        down.iter_mut().for_each(|lease| lease.settled = true);
        for lease in [&mut up, &mut learnt].into_iter().flatten() {
            lease.until_now(stream)?;
        }
        Ok(Ok(()))
    }
}

/// The elements of each piece.
fn pieces(call: &Call, bytes: usize) -> Vec<Range<usize>> {
    let whole = |count| std::iter::once(0..count).collect();
    let Some(buffer) = call.send.or(call.recv) else { return whole(0) };
    if !call.site.op.row().acts_on_elements() {
        // `part` leaves these as they are: their two sides may differ in size.
        return whole(usize::MAX);
    }
    if buffer.bytes() <= bytes {
        return whole(buffer.count());
    }
    // Even, so that pairs of a value and an index stay together.
    let step = (bytes / buffer.dtype().size()).max(2) & !1;
    let ends = |start: usize| start..(start + step).min(buffer.count());
    (0..buffer.count()).step_by(step).map(ends).collect()
}

/// Some elements of a buffer, or all of it.
fn part(buffer: &Buffer, range: &Range<usize>) -> Buffer {
    if range.end == usize::MAX {
        return *buffer;
    }
    buffer.part(range.start, range.len())
}

impl<T: Transport> Transport for Staged<T> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn execute(&self, call: &Call) -> Result<(), Error> {
        let located = |cause| Error { transport: Some(self.name), ..call.site.error(cause) };
        self.run(call).map_err(located)?
    }

    fn attach(&self, comm: &Arc<Comm>) -> Result<(), Error> {
        self.host.attach(comm)
    }

    fn stop(&self) {
        self.host.stop();
    }

    fn read_numbers(&self, numbers: &Buffer, into: &mut [i32], stream: Stream) -> Result<(), Cause> {
        let bytes = size_of_val(into).min(numbers.bytes());
        let mut staging = self.pool.lease(bytes, stream)?;
        let read = staging.data();
        // SAFETY: both buffers are as large.
        unsafe {
            self.device.download(numbers.data(), read, bytes, stream)?;
            self.device.synchronize(stream)?;
            staging.settled = true;
            read.copy_to_nonoverlapping(into.as_mut_ptr().cast(), bytes);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call::Site;
    use crate::ops::{Dtype, Op, Reduction};

    #[test]
    fn pieces_cover_everything_once() {
        let comm = Arc::new(Comm::new("pieces", 0, 0, 1));
        let site = Site { reduction: Reduction::from_name("SUM"), ..Site::new(Op::Allreduce, &comm) };
        for count in [0, 1, 2, 9, 10, 11, 1000] {
            // SAFETY: nobody reads it.
            let buffer = unsafe { Buffer::new(std::ptr::null_mut(), Dtype::Float32, count) };
            let call = Call::new(&site, Some(buffer), Some(buffer)).unwrap();
            let pieces = pieces(&call, 40);
            assert_eq!(pieces.iter().map(ExactSizeIterator::len).sum::<usize>(), count);
            assert!(pieces.windows(2).all(|two| two[0].end == two[1].start && two[0].len() == 10));
            assert!(!pieces.is_empty(), "ranks with nothing take part too");
        }
    }
}
