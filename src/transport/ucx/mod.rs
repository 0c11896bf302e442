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

use self::tag::Label;
pub use self::worker::Worker;
use self::worker::{Joined, UcxRequest, table};
use super::message::{Arrived, arrive, write_status};
use crate::call::Call;
use crate::comm::Comm;
use crate::device::{self, Platform};
use crate::error::Cause;
use crate::mpilib::wildcards;
use crate::ops::Buffer;

/// How long the end of the program waits for messages that are not received.
const PATIENCE: Duration = Duration::from_secs(2);

/// Whether UCX could be used. Whether it reaches the memory of a GPU is known when it has been started.
pub fn probe(platform: Platform) -> Result<(), String> {
    if platform == Platform::Cuda {
        device::support()?;
    }
    table().map(|_| ())
}

/// This process in UCX. Collective over `MPI_COMM_WORLD`.
pub fn start() -> Result<&'static Worker, String> {
    static WORKER: OnceLock<Result<Worker, String>> = OnceLock::new();
    WORKER.get_or_init(Worker::start).as_ref().map_err(String::clone)
}

impl Worker {
    pub fn reaches_cuda(&self) -> Result<(), String> {
        if self.memory_types & sys::MEMORY_TYPE_CUDA != 0 || device::is_reached_from_cpu() {
            return Ok(());
        }
        Err(format!("{} was built without CUDA", self.ucp.path))
    }

    /// Sends or receives a message, or both.
    pub fn execute(&'static self, call: &Call) -> Result<(), Cause> {
        let context = self.join(&call.site.comm)?.context;
        let mut copy = Vec::new();
        // The two may not share memory, and they may differ in size.
        let apart = |from: Buffer| call.recv.map_or(from, |to| from.apart_from(&to, &mut copy));
        let send = call.send.map(apart);
        // SAFETY: the buffers are XLA's and stay valid until this returns; requests end before that.
        unsafe {
            let receiving = call.recv.map(|recv| self.recv(call, context, &recv)).transpose()?;
            if let Some(sending) = send.map(|send| self.send(call, context, &send)).transpose()?.flatten() {
                sending.wait()?;
            }
            receiving.map_or(Ok(()), |receiving| finish(call, receiving))
        }
    }

    /// Meets the other ranks of a communicator, before its first message. Collective.
    pub fn join(&'static self, comm: &Comm) -> Result<Arc<Joined>, Cause> {
        static THREAD: OnceLock<Result<(), String>> = OnceLock::new();
        let start = || {
            let thread = std::thread::Builder::new().name("mpi4jax-ucx".into()).spawn(|| self.run());
            thread.map(drop).map_err(|error| error.to_string())
        };
        THREAD.get_or_init(start).clone().map_err(|message| Cause::Setting { message })?;
        comm.attach(|| self.agree(comm))
    }

    /// The program ends: others may need what this rank has sent; if one of them is gone, there is nothing to be done.
    pub fn stop(&self) {
        let _ = self.flush(PATIENCE);
        self.end();
    }
}

/// Waits, and says what came as MPI does.
fn finish(call: &Call, receiving: Option<UcxRequest>) -> Result<(), Cause> {
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
