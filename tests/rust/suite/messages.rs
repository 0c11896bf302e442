//! Messages between two ranks, and what NCCL refuses of them.

use _native::call::{Call, Envelope, Site};
use _native::error::Cause;
use _native::mpilib::wildcards;
use _native::ops::{Buffer, Dtype, Op};

use super::{Memory, Suite, pattern};

impl Suite<'_> {
    /// From every rank to the next one.
    pub(super) fn message(&self, op: Op, dtype: Dtype, count: usize, offset: usize) {
        let (rank, size) = (self.rank(), self.size());
        let (next, previous) = ((rank + 1) % size, (rank + size - 1) % size);
        let send = pattern(dtype, rank, 0, count);
        let expected = pattern(dtype, previous, 0, count);
        let tag = if self.is_nccl { 0 } else { 5 };
        let envelope = Envelope { source: previous as i32, recvtag: tag, dest: next as i32, sendtag: tag };
        let site = |op| Site { envelope, ..Site::new(op, self.comm) };
        let what = (op, dtype, count, offset);
        match op {
            Op::Sendrecv => {
                let result = self.execute(&site(op), &send, dtype, count, offset);
                result.expect("a result").check(&expected, &what);
            }
            // Each is the other half of the other.
            Op::Send => {}
            Op::Recv => {
                let send = || self.execute(&site(Op::Send), &send, dtype, 0, offset);
                let recv = || {
                    let result = self.execute(&site(op), &[], dtype, count, offset);
                    result.expect("a result").check(&expected, &what);
                };
                if rank % 2 == 0 {
                    // A message to oneself may wait for its receive.
                    if size > 1 {
                        send();
                        recv();
                    }
                } else {
                    recv();
                    send();
                }
            }
            _ => unreachable!("{op} has no peer"),
        }
    }

    /// Wildcards, what they turned out to be, and ranks with nobody at one side.
    pub(super) fn envelopes(&self) {
        let (rank, size) = (self.rank(), self.size());
        let (next, previous) = ((rank + 1) % size, (rank + size - 1) % size);
        let any = wildcards();
        let envelope =
            Envelope { source: any.source, recvtag: any.tag, dest: next as i32, sendtag: 40 + rank as i32 };
        let site = Site { envelope, envelope_result: true, ..Site::new(Op::Sendrecv, self.comm) };
        let mut from = Memory::holding(Dtype::Int16, &pattern(Dtype::Int16, rank, 0, 3), 0);
        let mut to = Memory::new(Dtype::Int16, 3, 0);
        let mut received = [0; 3];
        let mut call = Call::new(&site, Some(from.buffer()), Some(to.buffer())).expect("sizes are free");
        // SAFETY: three integers, which outlive the call.
        call.received = Some(unsafe { Buffer::new((&raw mut received).cast(), Dtype::Int32, 3) });
        self.carry(&call).expect("a ring");
        to.check(&pattern(Dtype::Int16, previous, 0, 3), &"wildcards");
        assert_eq!(received, [previous as i32, 40 + previous as i32, 3]);

        // An open chain. Both sides have types and sizes of their own.
        let at = |rank: usize, there: bool| if there { rank as i32 } else { any.proc_null };
        let envelope = Envelope {
            source: at(previous, rank > 0),
            recvtag: 2,
            dest: at(next, rank + 1 < size),
            sendtag: 2,
        };
        let site = Site { envelope, ..Site::new(Op::Sendrecv, self.comm) };
        let dtype = |rank: usize| if rank % 2 == 0 { Dtype::Float32 } else { Dtype::Int64 };
        let mut from = Memory::holding(dtype(rank), &pattern(dtype(rank), rank, 0, 1 + rank), 0);
        let mut to = Memory::new(dtype(previous), 1 + previous, 0);
        let call = Call::new(&site, Some(from.buffer()), Some(to.buffer())).expect("sizes are free");
        self.carry(&call).expect("a chain");
        let expected = pattern(dtype(previous), previous, 0, 1 + previous);
        let nothing = vec![0; expected.len()];
        to.check(if rank > 0 { &expected } else { &nothing }, &"a chain");
    }

    /// Of NCCL, before it communicates: no rank waits for one that was refused.
    pub(super) fn refusals(&self) {
        let (rank, size) = (self.rank(), self.size());
        let ring = Envelope {
            source: (rank + size - 1) as i32 % size as i32,
            recvtag: 0,
            dest: ((rank + 1) % size) as i32,
            sendtag: 0,
        };
        let refused = |site: &Site, recv, word: &str| {
            let mut from = Memory::holding(Dtype::Int32, &pattern(Dtype::Int32, rank, 0, 3), 0);
            let mut to = Memory::new(Dtype::Int32, recv, 0);
            let call = Call::new(site, Some(from.buffer()), Some(to.buffer())).expect("sizes are free");
            let error = self.carry(&call).expect_err(word);
            assert!(
                matches!(error.cause, Cause::Unsupported { .. }) && error.to_string().contains(word),
                "{error}"
            );
            to.check(&vec![0xa5; recv * 4], &word);
        };
        for (envelope, word) in [
            (Envelope { sendtag: 5, ..ring }, "sending with tag 5"),
            (Envelope { recvtag: 5, ..ring }, "receiving with tag 5"),
            (Envelope { source: wildcards().source, ..ring }, "ANY_SOURCE"),
        ] {
            refused(&Site { envelope, ..Site::new(Op::Sendrecv, self.comm) }, 3, word);
        }
    }

    pub(super) fn short_messages(&self) {
        let (rank, size) = (self.rank(), self.size());
        let (next, previous) = ((rank + 1) % size, (rank + size - 1) % size);
        let envelope = Envelope { source: previous as i32, recvtag: 3, dest: next as i32, sendtag: 3 };
        let site = Site { envelope, ..Site::new(Op::Sendrecv, self.comm) };
        let mut from = Memory::holding(Dtype::Uint8, &pattern(Dtype::Uint8, rank, 0, 3), 0);
        let mut to = Memory::new(Dtype::Uint8, 5, 0);
        let call = Call::new(&site, Some(from.buffer()), Some(to.buffer())).expect("sizes are free");
        let error = self.carry(&call).expect_err("the message is too short");
        assert!(
            matches!(&error.cause, Cause::ShortMessage { received: 3, expected: 5, source_rank, .. }
                if *source_rank == previous as i32),
            "{error}"
        );
        assert_eq!(error.op, Some("sendrecv"));
        let text = error.to_string();
        assert!(text.starts_with("sendrecv: MPI_Sendrecv received 3 items"), "{text}");
    }
}
