//! Ranks as threads of one process, for tests of everything above a transport.

use std::ffi::c_int;
use std::fmt;
use std::sync::{Arc, Barrier, Condvar, Mutex, MutexGuard, PoisonError};

use _native::call::Call;
use _native::error::{Cause, Error};
use _native::mpilib::wildcards;
use _native::ops::{self, Buffer, Builtin, Dtype, Extent, Reduction, Wire};
use _native::transport::{Arrived, Transport, arrive};

use super::model::{Made, Model, Place, model};

/// One rank.
#[derive(Clone)]
pub struct Loopback {
    rank: usize,
    world: Arc<World>,
}

struct World {
    meeting: Barrier,
    /// What each rank gave to the collective under way.
    given: Mutex<Vec<Arc<[u8]>>>,
    mailboxes: Vec<Mailbox>,
}

#[derive(Default)]
struct Mailbox {
    messages: Mutex<Vec<Message>>,
    came: Condvar,
}

struct Message {
    source: i32,
    tag: i32,
    bytes: Vec<u8>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl fmt::Debug for Loopback {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Loopback {} of {}", self.rank, self.world.mailboxes.len())
    }
}

impl Transport for Loopback {
    fn name(&self) -> &'static str {
        "loopback"
    }

    fn execute(&self, call: &Call) -> Result<(), Error> {
        self.run(call).map_err(|cause| Error { transport: Some(self.name()), ..call.site.error(cause) })
    }
}

impl Loopback {
    /// The ranks of a new world.
    pub fn world(size: usize) -> Vec<Self> {
        let world = Arc::new(World {
            meeting: Barrier::new(size),
            given: Mutex::new(vec![Arc::default(); size]),
            mailboxes: (0..size).map(|_| Mailbox::default()).collect(),
        });
        (0..size).map(|rank| Self { rank, world: Arc::clone(&world) }).collect()
    }

    /// Gives a copy of a buffer to all ranks; what all of them gave. The copy makes aliased buffers safe.
    fn exchange(&self, mine: Option<Buffer>) -> Vec<Arc<[u8]>> {
        let mine = mine.map_or(Arc::default(), |buffer| contents(&buffer).into());
        lock(&self.world.given)[self.rank] = mine;
        self.world.meeting.wait();
        let all = lock(&self.world.given).clone();
        // Nobody gives to the next collective before everybody has taken from this one.
        self.world.meeting.wait();
        all
    }

    fn run(&self, call: &Call) -> Result<(), Cause> {
        let site = call.site;
        let at = Place {
            rank: self.rank,
            size: self.world.mailboxes.len(),
            root: site.root as usize,
            reverse: site.reverse,
        };
        let mut ghosts = Ghosts { rank: self, receives: Vec::new() };
        match model(site.op, at) {
            Model::Blocks(made) => {
                let all = self.exchange(call.send);
                call.recv.map_or(Ok(()), |recv| fill(call, &recv, &result(call, made, &all)?))
            }
            Model::Ghosts => {
                let halo = site.halo.as_ref().expect("ghost cells");
                halo.exchange(call.blocks(), site.comm.rank, &mut ghosts)
            }
            Model::Parts { .. } => {
                let parts = site.parts.as_ref().expect("parts");
                // SAFETY: buffers of the suite's.
                unsafe { parts.exchange(call.send, call.recv, &mut ghosts) }
            }
            Model::Ragged => {
                let ragged = site.ragged.as_ref().expect("room for rows");
                let (to, from) = ragged.agree(call.counts, |mine, theirs| {
                    let data = mine.as_ptr().cast_mut().cast();
                    // SAFETY: an array that outlives the exchange.
                    let mine = unsafe { Buffer::new(data, Dtype::Int32, mine.len()) };
                    let all = self.exchange(Some(mine));
                    for (number, all) in theirs.iter_mut().zip(all) {
                        let own = all.as_chunks().0.get(self.rank).copied();
                        *number = own.map_or(-1, i32::from_ne_bytes);
                    }
                    Ok(())
                })?;
                let parts = ragged.parts(&to, &from, "")?;
                parts.check(call.send, call.recv)?;
                // SAFETY: buffers of the suite's.
                unsafe {
                    if let Some(counts) = call.received {
                        counts.data().cast::<i32>().copy_from(from.as_ptr(), from.len());
                    }
                    parts.exchange(call.send, call.recv, &mut ghosts)
                }
            }
            Model::Message => {
                if site.op.row().sends() {
                    self.send(call);
                }
                if site.op.row().receives() { self.receive(call) } else { Ok(()) }
            }
        }
    }

    /// Never waits: a mailbox is as large as it needs to be.
    fn send(&self, call: &Call) {
        let bytes = call.send.map_or(Vec::new(), |buffer| contents(&buffer).to_vec());
        if call.envelope.dest == wildcards().proc_null {
            return;
        }
        self.post(
            call.envelope.dest,
            Message { source: self.rank as i32, tag: call.envelope.sendtag, bytes },
        );
    }

    fn post(&self, dest: i32, message: Message) {
        let mailbox = &self.world.mailboxes[dest as usize];
        lock(&mailbox.messages).push(message);
        mailbox.came.notify_all();
    }

    /// Waits for a message.
    fn take(&self, matches: impl Fn(&Message) -> bool) -> Message {
        let mailbox = &self.world.mailboxes[self.rank];
        let mut messages = lock(&mailbox.messages);
        loop {
            match messages.iter().position(&matches) {
                Some(found) => return messages.remove(found),
                None => messages = mailbox.came.wait(messages).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }

    fn receive(&self, call: &Call) -> Result<(), Cause> {
        let (any, envelope) = (wildcards(), call.envelope);
        let Some(recv) = &call.recv else { return Ok(()) };
        if envelope.source == any.proc_null {
            return arrive(call, &Arrived { source: any.proc_null, tag: any.tag, count: 0 });
        }
        let matches = |message: &Message| {
            (envelope.source == any.source || envelope.source == message.source)
                && (envelope.recvtag == any.tag || envelope.recvtag == message.tag)
        };
        let Message { source, tag, bytes } = self.take(matches);
        if bytes.len() > recv.bytes() {
            return Err(truncated(call, recv, bytes.len()));
        }
        // SAFETY: the result's memory, at least as large.
        unsafe { recv.data().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        arrive(call, &Arrived { source, tag, count: bytes.len() / recv.dtype().size() })
    }
}

/// Tags of ghost cells, beyond those of the tests' messages.
const GHOSTS: i32 = 1 << 20;

/// Ghost cells that travel at once.
struct Ghosts<'a> {
    rank: &'a Loopback,
    receives: Vec<(i32, i32, *mut u8, usize)>,
}

impl Wire for Ghosts<'_> {
    unsafe fn receive(&mut self, peer: i32, tag: i32, into: *mut u8, bytes: usize) -> Result<(), Cause> {
        self.receives.push((peer, GHOSTS + tag, into, bytes));
        Ok(())
    }

    unsafe fn send(&mut self, peer: i32, tag: i32, from: *mut u8, bytes: usize) -> Result<(), Cause> {
        // SAFETY: promised by the caller.
        let bytes = unsafe { std::slice::from_raw_parts(from, bytes) }.to_vec();
        self.rank.post(peer, Message { source: self.rank.rank as i32, tag: GHOSTS + tag, bytes });
        Ok(())
    }

    fn wait(&mut self) -> Result<(), Cause> {
        for (source_rank, tag, into, expected) in self.receives.drain(..) {
            let message = self.rank.take(|message| message.source == source_rank && message.tag == tag);
            let received = message.bytes.len();
            if received != expected {
                return Err(Cause::Ghosts { received, source_rank, expected });
            }
            // SAFETY: promised by the caller of `receive`.
            unsafe { into.copy_from_nonoverlapping(message.bytes.as_ptr(), received) };
        }
        Ok(())
    }
}

fn contents(buffer: &Buffer) -> &[u8] {
    // SAFETY: a buffer's memory is valid during the call; an empty one may have no address.
    if buffer.count() == 0 {
        &[]
    } else {
        unsafe { std::slice::from_raw_parts(buffer.data(), buffer.bytes()) }
    }
}

/// Writes a whole result.
fn fill(call: &Call, recv: &Buffer, bytes: &[u8]) -> Result<(), Cause> {
    if bytes.len() != recv.bytes() {
        return Err(truncated(call, recv, bytes.len()));
    }
    // SAFETY: the result's memory, of this size; the bytes are a copy.
    unsafe { recv.data().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    Ok(())
}

fn truncated(call: &Call, recv: &Buffer, bytes: usize) -> Cause {
    let (got, expected) = (bytes / recv.dtype().size(), recv.count());
    Cause::Mpi {
        function: call.site.op.mpi_name(),
        code: 15,
        text: format!("the other ranks' data are {got} elements, expected {expected}").into(),
    }
}

/// The bytes of a collective's result, from what each rank gave.
fn result(call: &Call, made: Made, all: &[Arc<[u8]>]) -> Result<Vec<u8>, Cause> {
    let row = call.site.op.row();
    // Where one operand that is read consists of several blocks, all do.
    let several = [row.at_root, row.elsewhere].iter().any(|side| side.send == Extent::PerRank);
    let block = |(from, which): (usize, usize)| {
        if let (Some(parts), Some(send)) = (&call.site.parts, &call.send) {
            let (part, width) = (parts.both()[0][which], send.dtype().size());
            return &all[from][part.start * width..][..part.count * width];
        }
        let size = all[from].len() / if several { all.len() } else { 1 };
        &all[from][which * size..(which + 1) * size]
    };
    match made {
        Made::Of(blocks) => Ok(blocks.into_iter().flat_map(block).copied().collect()),
        Made::Reduced(ranks, which) => {
            let blocks: Vec<_> = ranks.map(|rank| block((rank, which))).collect();
            match blocks.split_last() {
                Some((last, others)) => reduce(call, last, others),
                None => Ok(vec![0; call.send.map_or(0, |send| send.bytes())]),
            }
        }
    }
}

/// Reduces in the order of the ranks.
fn reduce(call: &Call, last: &[u8], others: &[&[u8]]) -> Result<Vec<u8>, Cause> {
    let (Some(send), Some(Reduction::Builtin(builtin))) = (&call.send, call.site.reduction) else {
        return Err(Cause::Unsupported {
            feature: "this reduction".into(),
            reason: "it is not one of MPI's own",
        });
    };
    let dtype = send.dtype();
    let combine = ops::combine(builtin, dtype)
        .ok_or(Cause::UndefinedReduction { reduction: builtin.name(), dtype: dtype.name() })?;
    let width = if matches!(builtin, Builtin::Maxloc | Builtin::Minloc) { 2 } else { 1 };
    let count = last.len() / dtype.size();
    if !count.is_multiple_of(width) {
        return Err(Cause::Pairs { count });
    }
    let mut result = last.to_vec();
    for rank in others.iter().rev() {
        if rank.len() != result.len() {
            return Err(truncated(call, send, rank.len()));
        }
        let mut count = (count / width) as c_int;
        // SAFETY: both hold `count` elements.
        unsafe {
            let (input, inout) = (rank.as_ptr().cast_mut().cast(), result.as_mut_ptr().cast());
            combine(input, inout, &mut count, std::ptr::null_mut());
        }
    }
    Ok(result)
}
