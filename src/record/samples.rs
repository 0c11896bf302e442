//! Samples of what this rank has done, which the ranks compare afterwards.
//!
//! The two ends of a message find each other by its content. Numbers would not do: threads, wildcards and messages that
//! mpi4py sends or receives shift them. What is all zeros is no sample, since it has the same value in every data type, nor is
//! what has 8 bits per element, as which programs send anything.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use crate::call::Call;
use crate::comm::{Comm, hash};
use crate::mpilib::Tag;
use crate::ops::{Buffer, Class, Dtype};
use crate::sync::lock;

/// How many samples are kept: as many of the first ones as of the last ones.
const CAPACITY: usize = 512;
/// How many bytes of a message are looked at.
const BYTES: usize = 16 << 10;

/// A sample of an operation or message of this rank.
#[derive(Clone, Debug)]
pub struct Sample {
    pub comm: Arc<Comm>,
    /// mpi4jax alone communicates on the communicator.
    pub is_ours: bool,
    /// Equal for the same operation or message on another rank.
    pub key: u64,
    /// Hash of what has to be the same there.
    pub print: u64,
    /// Names and shapes of leaves, which ought to be the same there; empty if not known.
    pub form: Box<str>,
    /// Of a collective in a `shard_map`: what its ranks have alike.
    pub boundary: Box<str>,
    /// The ranks to compare with, in `MPI_COMM_WORLD`.
    pub others: [i32; 2],
    pub words: String,
    pub collective: Option<Collective>,
}

/// What the sample of a collective holds in addition.
#[derive(Clone, Debug)]
pub struct Collective {
    pub number: u64,
    pub name: &'static str,
    /// No other collective on the communicator ran at the same time.
    pub alone: bool,
    /// Size in bytes; 0 where ranks may have different sizes.
    pub size: u64,
}

static SAMPLES: Mutex<Vec<Sample>> = Mutex::new(Vec::new());
/// The program has the default communicator too.
static SHARED: AtomicBool = AtomicBool::new(false);

pub fn samples() -> MutexGuard<'static, Vec<Sample>> {
    lock(&SAMPLES)
}

/// From now on the program may communicate on the default communicator by itself.
#[cfg_attr(feature = "python", pyo3::pyfunction(name = "watch_share_default"))]
pub fn share_default() {
    SHARED.store(true, Ordering::Relaxed);
}

pub fn is_ours(comm: &Comm) -> bool {
    comm.is_default() && !SHARED.load(Ordering::Relaxed)
}

pub fn add(samples: &mut Vec<Sample>, sample: Sample) {
    if samples.len() == CAPACITY {
        samples.remove(CAPACITY / 2);
    }
    samples.push(sample);
}

/// A message that is sent. Its memory is the host's.
#[cold]
pub fn sent(call: &Call) {
    let (rank, other, tag) = (call.site.comm.rank, call.envelope.dest, call.envelope.sendtag);
    message(call, (call.send, &call.site.forms.sent), (rank, other), other, "to", tag);
}

/// A message that has come, of so many elements. Its memory is the host's.
#[cold]
pub fn received(call: &Call, source: i32, tag: i32, count: usize) {
    let buffer = call.recv.map(|buffer| buffer.part(0, count.min(buffer.count())));
    message(call, (buffer, &call.site.forms.received), (source, call.site.comm.rank), source, "from", tag);
}

fn message(
    call: &Call,
    (buffer, form): (Option<Buffer>, &str),
    (source, dest): (i32, i32),
    other: i32,
    word: &str,
    tag: i32,
) {
    let comm = &call.site.comm;
    let (Some(buffer), Some(world)) = (buffer, comm.world_rank(other)) else { return };
    if buffer.count() == 0 || buffer.dtype().size() == 1 {
        return;
    }
    // SAFETY: the memory of an operand, or of a result that has been written.
    let bytes = unsafe { std::slice::from_raw_parts(buffer.data(), buffer.bytes().min(BYTES)) };
    if bytes.iter().all(|&byte| byte == 0) {
        return;
    }
    let (count, dtype) = (buffer.count(), buffer.dtype().name());
    let mut words =
        format!("{} {word} {other}, {} ({count} x {dtype}) on {}", call.site.name(), Tag(tag), comm.key);
    if !call.site.location.is_empty() {
        words += &format!(", {}", call.site.location);
    }
    let sample = Sample {
        comm: comm.clone(),
        is_ours: is_ours(comm),
        key: hash((comm.class, source, dest, tag, buffer.bytes(), bytes)),
        print: hash(values(buffer.dtype())),
        form: form.into(),
        boundary: "".into(),
        others: [world; 2],
        words,
        collective: None,
    };
    let mut samples = samples();
    let is_same =
        |other: &Sample| (other.key, other.print, &other.form) == (sample.key, sample.print, &sample.form);
    if !samples.iter().any(|other| is_same(other) && Arc::ptr_eq(&other.comm, comm)) {
        add(&mut samples, sample);
    }
}

/// What the bits of a message mean: those of a signed integer are mostly those of an unsigned one, and those of a complex
/// number are those of two real ones.
fn values(dtype: Dtype) -> (&'static str, usize) {
    match dtype.class() {
        Class::Bool | Class::Integer | Class::Narrow => ("integer", dtype.size()),
        Class::Complex => ("float", dtype.size() / 2),
        Class::Half if dtype == Dtype::Bfloat16 => ("bfloat", dtype.size()),
        Class::Float | Class::Half => ("float", dtype.size()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call::{Envelope, Site, Stream};
    use crate::ops::Op;

    /// The samples of a message whose ends have these types.
    fn both_ends<T>(name: &str, values: &mut [T], types: [Dtype; 2]) -> Vec<Sample> {
        let bytes = size_of_val(values);
        let ends =
            [Op::Send, Op::Recv].map(|op| (op, Arc::new(Comm::new(name, i32::from(op == Op::Recv), 2))));
        for ((op, comm), dtype) in ends.iter().zip(types) {
            let site = Site { location: "a.py:1".into(), ..Site::new(*op, comm) };
            let envelope = Envelope { source: -1, recvtag: -1, dest: 1, sendtag: 7 };
            // SAFETY: the values.
            let buffer = unsafe { Buffer::new(values.as_mut_ptr().cast(), dtype, bytes / dtype.size()) };
            let mut call = Call { envelope, ..Call::of(&site, Stream::NONE) };
            if *op == Op::Send {
                call.send = Some(buffer);
                sent(&call);
            } else {
                call.recv = Some(buffer);
                received(&call, 0, 7, buffer.count());
            }
        }
        let of_ends = |sample: &&Sample| ends.iter().any(|(_, comm)| Arc::ptr_eq(comm, &sample.comm));
        samples().iter().filter(of_ends).cloned().collect()
    }

    #[test]
    fn the_ends_of_a_message_find_each_other_by_its_content() {
        let [send, recv] = &both_ends("samples", &mut [1, 2], [Dtype::Int32, Dtype::Float32])[..] else {
            panic!("one of each end")
        };
        assert_eq!(send.key, recv.key);
        assert_ne!(send.print, recv.print);
        assert_eq!((send.others, recv.others), ([1; 2], [0; 2]));
        assert_eq!(recv.words, "recv from 0, tag 7 (2 x float32) on samples, a.py:1");
        let other = both_ends("samples-other", &mut [1, 3], [Dtype::Int32; 2]);
        assert_ne!(other[0].key, send.key);
        assert_eq!(other[0].print, other[1].print);
    }

    #[test]
    fn what_may_be_received_as_another_type_is_no_difference() {
        for types in [[Dtype::Int32, Dtype::Uint32], [Dtype::Complex64, Dtype::Float32]] {
            let [send, recv] = &both_ends("samples-alike", &mut [1, 2], types)[..] else { panic!() };
            assert_eq!((send.key, send.print), (recv.key, recv.print));
        }
        assert!(both_ends("samples-zeros", &mut [0, 0], [Dtype::Int32, Dtype::Float32]).is_empty());
        assert_eq!(both_ends("samples-bytes", &mut [1, 2], [Dtype::Uint8, Dtype::Float32]).len(), 1);
        assert!(both_ends::<i32>("samples-none", &mut [], [Dtype::Int32, Dtype::Float32]).is_empty());
    }

    #[test]
    fn the_first_samples_are_kept_and_the_last_ones() {
        let [sample, _] = &both_ends("samples-many", &mut [1, 4], [Dtype::Int32; 2])[..] else { panic!() };
        let mut many = Vec::new();
        (0..5 * CAPACITY as u64).for_each(|key| add(&mut many, Sample { key, ..sample.clone() }));
        let keys: Vec<u64> = many.iter().map(|sample| sample.key).collect();
        let (half, end) = (CAPACITY as u64 / 2, 5 * CAPACITY as u64);
        assert_eq!(keys, (0..half).chain(end - half..end).collect::<Vec<u64>>());
    }
}
