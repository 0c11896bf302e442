//! Messages through UCX's tag matching; everything else through MPI.
//!
//! Each process has one worker. Addresses are exchanged once, when mpi4jax is imported, and an endpoint is
//! made when the first message goes to its rank. UCX delivers nothing unless it is called, so while a rank
//! is elsewhere (in MPI, say), a thread calls it: a thousand times a second while messages come and go, and about
//! thirty times when none do.

mod sys;
mod tag;
mod worker;

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use self::tag::{Label, Wanted};
use self::worker::{Joined, UcxRequest, Worker, table};
use super::{Arrived, Platform, Transport, arrive, write_status};
use crate::call::{Call, Envelope};
use crate::comm::Comm;
use crate::device;
use crate::error::{Cause, Error};
use crate::mpilib::wildcards;
use crate::ops::Buffer;

/// How long the end of the program waits for messages that nobody receives.
const PATIENCE: Duration = Duration::from_secs(2);

/// Whether UCX could be used. Whether it reaches the memory of a GPU is known when it has been started.
pub fn probe(platform: Platform) -> Result<(), String> {
    if platform == Platform::Cuda {
        device::support()?;
    }
    table().map(|_| ()).map_err(|error| error.to_string())
}

/// Messages through UCX.
#[derive(Clone, Copy)]
pub struct Ucx {
    worker: &'static Worker,
}

impl std::fmt::Debug for Ucx {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Ucx").field(&self.worker.ucp.path).finish()
    }
}

impl Ucx {
    /// Collective over `MPI_COMM_WORLD`.
    pub fn start() -> Result<Self, String> {
        static WORKER: OnceLock<Result<Worker, String>> = OnceLock::new();
        let worker = WORKER.get_or_init(Worker::start).as_ref().map_err(String::clone)?;
        static THREAD: OnceLock<Result<(), String>> = OnceLock::new();
        let thread = || {
            let builder = std::thread::Builder::new().name("mpi4jax-ucx".into());
            builder.spawn(|| worker.run()).map(|_| ()).map_err(|error| error.to_string())
        };
        THREAD.get_or_init(thread).clone()?;
        Ok(Self { worker })
    }

    pub fn reaches_cuda(&self) -> Result<(), String> {
        if self.worker.memory_types & sys::MEMORY_TYPE_CUDA != 0 || device::is_reached_from_cpu() {
            return Ok(());
        }
        Err(format!("{} was built without CUDA", self.worker.ucp.path))
    }

    fn run(&self, call: &Call) -> Result<(), Cause> {
        let comm = &call.site.comm;
        let joined = comm.attach(|| self.worker.agree(comm))?;
        let joined = &*joined;
        // SAFETY: the buffers are XLA's and stay valid until this returns; requests end before that.
        unsafe {
            match (call.send, call.recv) {
                (Some(send), None) => {
                    let sending = self.send(call, joined, &send)?;
                    sending.map(UcxRequest::wait).transpose()?;
                    Ok(())
                }
                (None, Some(recv)) => {
                    let receiving = self.recv(call, joined, &recv)?;
                    self.finish(call, receiving)
                }
                (Some(send), Some(recv)) => {
                    // The two may not share memory, and they may differ in size.
                    let bytes = || std::slice::from_raw_parts(send.data(), send.bytes()).to_vec();
                    let mut copy = send.overlaps(&recv).then(bytes);
                    let data = copy.as_mut().map_or(send.data(), |copy| copy.as_mut_ptr());
                    let receiving = self.recv(call, joined, &recv)?;
                    let sending = self.send(call, joined, &send.moved_to(data))?;
                    sending.map(UcxRequest::wait).transpose()?;
                    self.finish(call, receiving)
                }
                (None, None) => Err(Cause::Buffers { operand: "operand", expected: 1, actual: 0 }),
            }
        }
    }

    /// # Safety
    /// As [`Worker::send`].
    unsafe fn send(
        &self,
        call: &Call,
        joined: &Joined,
        buffer: &Buffer,
    ) -> Result<Option<UcxRequest<'static>>, Cause> {
        let Envelope { dest, sendtag, .. } = call.envelope;
        if dest == wildcards().proc_null {
            return Ok(None);
        }
        let comm = &call.site.comm;
        let no_such_rank = Cause::NoSuchRank { role: "destination", rank: dest, size: comm.size };
        let to = comm.world_rank(dest).ok_or(no_such_rank)?;
        let label = Label { context: joined.context, source: comm.rank, tag: sendtag };
        // SAFETY: promised by the caller.
        unsafe { self.worker.send(buffer, to, label) }.map(Some)
    }

    /// # Safety
    /// As [`Worker::recv`].
    unsafe fn recv(
        &self,
        call: &Call,
        joined: &Joined,
        buffer: &Buffer,
    ) -> Result<Option<UcxRequest<'static>>, Cause> {
        let Envelope { source, recvtag, .. } = call.envelope;
        let any = wildcards();
        if source == any.proc_null {
            return Ok(None);
        }
        let size = call.site.comm.size;
        if source != any.source && !(0..size).contains(&source) {
            return Err(Cause::NoSuchRank { role: "source", rank: source, size });
        }
        let wanted = Wanted {
            context: joined.context,
            source: (source != any.source).then_some(source),
            tag: (recvtag != any.tag).then_some(recvtag),
        };
        // SAFETY: promised by the caller.
        unsafe { self.worker.recv(buffer, wanted) }.map(Some)
    }

    /// Waits, and says what came as MPI does.
    fn finish(&self, call: &Call, receiving: Option<UcxRequest>) -> Result<(), Cause> {
        let size = call.recv.map_or(1, |recv| recv.dtype().size());
        let arrived = match receiving {
            None => {
                let any = wildcards();
                Arrived { source: any.proc_null, tag: any.tag, count: 0 }
            }
            Some(request) => {
                let received = request.wait()?;
                let Label { source, tag, .. } = Label::decode(received.sender_tag);
                Arrived { source, tag, count: received.length / size }
            }
        };
        if call.status.is_some() {
            write_status(call, &arrived)?;
        }
        arrive(call, &arrived)
    }
}

impl Transport for Ucx {
    fn name(&self) -> &'static str {
        "ucx"
    }

    fn execute(&self, call: &Call) -> Result<(), Error> {
        self.run(call).map_err(|cause| Error { transport: Some(self.name()), ..call.site.error(cause) })
    }

    /// Messages; MPI has all else.
    fn takes(&self, call: &Call) -> Result<bool, Cause> {
        Ok(!call.site.op.row().is_collective())
    }

    fn attach(&self, comm: &Arc<Comm>) -> Result<(), Error> {
        Ok(comm.attach(|| self.worker.agree(comm)).map(drop)?)
    }

    fn stop(&self) {
        // Others may need what this rank has sent; if one of them is gone, there is nothing to be done.
        let _ = self.worker.flush(PATIENCE);
        self.worker.stop();
    }
}
