//! Messages: the number and the tags of messages between two ranks, and whether the two ends of a message have the same type.
//!
//! The sender leaves prints of its last messages on the board. The receiver looks there for those that may be the message it has
//! got: of its tag, its length, and a sample of its bytes. If there are some, and none has its type, the ends differ.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::board::slot::{MESSAGES, PEERS, hash};
use crate::board::{Once, Peer, board, mix, own};
use crate::call::{Call, Site, Stream};
use crate::comm::Comm;
use crate::mpilib::Tag;
use crate::ops::{Buffer, Class, Dtype};
use crate::output::print;
use crate::sync::lock;

/// How many bytes at the beginning and at the end of a message are hashed.
const SAMPLE: usize = 64;

/// The ends of a message that differ.
pub struct Difference {
    /// The sender, in `MPI_COMM_WORLD`.
    pub sender: i32,
    /// What this rank has received, in words, and what the sender did last there.
    pub words: String,
    pub sent: String,
    /// Names or shapes of leaves differ, and nothing else.
    pub is_form: bool,
    pub is_default: bool,
}

static FOUND: Mutex<Option<Difference>> = Mutex::new(None);
static IS_FOUND: AtomicBool = AtomicBool::new(false);

/// A difference that has been found since this was called last.
#[inline]
pub fn difference() -> Option<Difference> {
    if IS_FOUND.load(Ordering::Relaxed) { take() } else { None }
}

#[cold]
fn take() -> Option<Difference> {
    IS_FOUND.store(false, Ordering::Relaxed);
    lock(&FOUND).take()
}

/// The interpretation of the bits of a message. Signed and unsigned integers count as one, and a complex number as two real ones.
fn meaning(dtype: Dtype) -> u64 {
    let (kind, size) = match dtype.class() {
        Class::Bool | Class::Integer | Class::Narrow => (1, dtype.size()),
        Class::Complex => (2, dtype.size() / 2),
        Class::Half if dtype == Dtype::Bfloat16 => (3, dtype.size()),
        Class::Float | Class::Half => (2, dtype.size()),
    };
    kind << 8 | size as u64
}

/// Two messages of the same kind have the same type for the receiver.
fn kind(dtype: Dtype, form: u64) -> u64 {
    (mix(meaning(dtype), form) | Peer::COUNT) ^ Peer::COUNT
}

/// A hash by which both ends recognize a message; 0: the message is not compared. Zeros have the same value in every dtype, and
/// programs send arbitrary data as elements of 8 bits.
fn key(buffer: &Buffer, tag: i32) -> u64 {
    let length = buffer.bytes();
    if buffer.count() == 0 || buffer.dtype().size() == 1 {
        return 0;
    }
    // SAFETY: the host's memory of an operand, or of a result that has been written.
    let bytes = unsafe { std::slice::from_raw_parts(buffer.data(), length) };
    let (head, tail) = (&bytes[..length.min(SAMPLE)], &bytes[length - length.min(SAMPLE)..]);
    let fold = |sum: (u64, u64), part: &[u8]| {
        let mut word = [0; 8];
        word[..part.len()].copy_from_slice(part);
        (mix(sum.0, u64::from_le_bytes(word)), sum.1 | u64::from_le_bytes(word))
    };
    let (sum, any) = head.chunks(8).chain(tail.chunks(8)).fold((mix(length as u64, tag as u64), 0), fold);
    if any == 0 { 0 } else { sum | 1 }
}

fn peer(comm: &Comm, rank: i32) -> Option<(i32, &'static Peer)> {
    let world = comm.world_rank(rank).filter(|rank| *rank >= 0)?;
    let known = own().known_peer(comm.message_key(), world);
    Some((world, known.unwrap_or_else(|| claim_peer(comm, world))))
}

#[cold]
fn claim_peer(comm: &Comm, world: i32) -> &'static Peer {
    let (peer, was_taken) = own().claim_peer(comm.message_key(), world);
    if was_taken && board().is_first_to(Once::Peers) {
        print(&format!(
            "r{} | mpi4jax: this rank exchanges messages with more than {PEERS} ranks (each counted once per communicator): the data \
             types of some messages are not compared, and a deadlock beside a message that is never received may not be reported\n",
            board().rank
        ));
    }
    peer
}

/// The hash of what a site sends, as names and shapes; 0: it has none.
pub fn form(site: &Site) -> u64 {
    if site.forms.sent.is_empty() { 0 } else { hash(&site.forms.sent) }
}

/// Whether two forms are equal, or one is not known.
#[inline]
pub fn are_forms_equal(one: u64, other: u64) -> bool {
    one == 0 || other == 0 || one == other
}

/// A message is about to be sent.
#[inline]
pub fn sends(call: &Call) {
    let (envelope, stream) = (call.envelope, call.stream);
    // The content of messages is looked at here.
    if let Some(buffer) = call.send.filter(|_| stream == Stream::NONE && board().is_shared())
        && let Some((_, peer)) = peer(&call.site.comm, envelope.dest)
    {
        let &(_, form) = call.site.base.get_or_init(|| (0, form(call.site)));
        let print = [key(&buffer, envelope.sendtag), meaning(buffer.dtype()), form];
        peer.note(kind(buffer.dtype(), form), print);
    }
}

/// A message has been sent, as far as this rank is concerned.
#[inline]
pub fn has_sent(comm: &Comm, dest: i32, tag: i32) {
    if let Some((_, peer)) = peer(comm, dest) {
        peer.sent.fetch_add(weight(tag), Ordering::Release);
    }
}

/// What a message adds to the sums of messages that were sent and received: 1, and above [`COUNTED`] bits a hash of its tag. The
/// difference of two sums then has the number of messages that were not received, and the sum of the hashes of their tags.
#[inline]
pub fn weight(tag: i32) -> u64 {
    mix(tag as u64, 0) << COUNTED | 1
}

const COUNTED: u32 = 24;

/// The messages from a rank to another one on a communicator that were not received: the difference of two sums of weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unreceived(pub u64);

impl Unreceived {
    /// How many. Negative: messages were received that this package has not sent.
    pub fn count(self) -> i64 {
        ((self.0 << (64 - COUNTED)) as i64) >> (64 - COUNTED)
    }

    /// Whether all of them have this tag.
    pub fn all_have(self, tag: i32) -> bool {
        self.count() > 0 && self.0 == weight(tag).wrapping_mul(self.count() as u64)
    }

    /// Whether each of them has one of two of these tags. With more messages or tags, that would be too likely to be chance.
    fn have_two_of(self, tags: &[i32]) -> bool {
        let sums = |count: i64| tags.iter().take(64).map(move |tag| weight(*tag).wrapping_mul(count as u64));
        let is_sum =
            |one: i64| sums(one).any(|sum| sums(self.count() - one).any(|it| sum.wrapping_add(it) == self.0));
        self.count() <= 16 && (1..=self.count() / 2).any(is_sum)
    }

    /// Whether a receive of this tag may match one of them; `None`: of any tag. The sender has used the tags in `used` lately.
    pub fn may_match(self, tag: Option<i32>, used: &[i32]) -> bool {
        let Some(tag) = tag else { return self.count() > 0 };
        let others = || used.iter().copied().filter(|it| *it != tag).collect::<Vec<_>>();
        let have_others = |it: &[i32]| it.iter().any(|tag| self.all_have(*tag)) || self.have_two_of(it);
        self.count() > 0 && (self.all_have(tag) || self.count() > 1 && !have_others(&others()))
    }
}

/// A message of `count` elements has arrived.
#[inline]
pub fn received(call: &Call, source: i32, tag: i32, count: usize) {
    let comm = &call.site.comm;
    let Some((world, peer)) = peer(comm, source) else { return };
    let before = peer.received.fetch_add(weight(tag), Ordering::Release);
    let Some(recv) = call.recv.filter(|_| call.stream == Stream::NONE) else { return };
    let buffer = recv.part(0, count.min(recv.count()));
    let (Some(slot), Some(me)) = (board().slot(world), comm.world_rank(comm.rank)) else { return };
    let Some(its) = slot.known_peer(comm.message_key(), me) else { return };
    let form = if call.site.forms.received.is_empty() { 0 } else { hash(&call.site.forms.received) };
    // All of the sender's last messages have this type.
    if its.steady.load(Ordering::Acquire) == kind(buffer.dtype(), form) {
        return;
    }
    let found = its.sent_last();
    // What is not among its last messages any more may be the one.
    let noted = its.noted.load(Ordering::Acquire);
    let later = noted.wrapping_sub(before) & ((1 << COUNTED) - 1);
    if !(1..=MESSAGES as u64).contains(&later) {
        return;
    }
    let key = key(&buffer, tag);
    let mut candidates = found.iter().filter(|print| key != 0 && print[0] == key).peekable();
    if candidates.peek().is_none() {
        return;
    }
    let means = meaning(buffer.dtype());
    let mut any_type = false;
    for [_, its_meaning, its_form] in candidates {
        any_type |= *its_meaning == means;
        if *its_meaning == means && are_forms_equal(*its_form, form) {
            return;
        }
    }
    differs(call, world, (source, tag), &buffer, any_type);
}

#[cold]
fn differs(call: &Call, sender: i32, (source, tag): (i32, i32), buffer: &Buffer, is_form: bool) {
    let site = call.site;
    let (count, dtype) = (buffer.count(), buffer.dtype().name());
    let mut words =
        format!("{} from {source}, {} ({count} x {dtype}) on {}", site.name(), Tag(tag), site.comm.key);
    if !site.location.is_empty() {
        words += &format!(", {}", site.location);
    }
    let slot = board().slot(sender);
    let records = slot.map(super::recorder::records).unwrap_or_default();
    let rank = site.comm.rank;
    let sent = records.iter().rev().find(|it| it.op.row().sends() && it.dest == rank && it.sendtag == tag);
    let mut text = sent.map_or_else(|| "a message of another type".into(), ToString::to_string);
    if let Some(sent) = sent.filter(|_| is_form) {
        words += &format!(", of {}", site.forms.received);
        text += &format!(", of {}", sent.forms);
    }
    let is_default = site.comm.is_default();
    *lock(&FOUND) = Some(Difference { sender, words, sent: text, is_form, is_default });
    IS_FOUND.store(true, Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::ops::{Forms, Op};

    fn key_of<T>(values: &mut [T], dtype: Dtype, tag: i32) -> u64 {
        let bytes = size_of_val(values);
        // SAFETY: the values.
        key(&unsafe { Buffer::new(values.as_mut_ptr().cast(), dtype, bytes / dtype.size()) }, tag)
    }

    #[test]
    fn a_message_is_known_by_tag_length_and_bytes() {
        let one = key_of(&mut [1, 2], Dtype::Int32, 7);
        assert_eq!(one, key_of(&mut [1, 2], Dtype::Float32, 7));
        for other in [
            key_of(&mut [1, 3], Dtype::Int32, 7),
            key_of(&mut [1, 2], Dtype::Int32, 8),
            key_of(&mut [1, 2, 0], Dtype::Int32, 7),
        ] {
            assert_ne!(one, other);
        }
        assert_eq!(key_of(&mut [0, 0], Dtype::Int32, 7), 0, "zeros");
        assert_eq!(key_of(&mut [1, 2], Dtype::Uint8, 7), 0);
        assert_eq!(key_of::<i32>(&mut [], Dtype::Int32, 7), 0);
    }

    #[test]
    fn tags_of_messages_that_were_not_received_are_told_by_sums() {
        let sum = |tags: &[i32]| tags.iter().fold(0u64, |sum, tag| sum.wrapping_add(weight(*tag)));
        let of = |sent: &[i32], received: &[i32]| Unreceived(sum(sent).wrapping_sub(sum(received)));
        let tags: Vec<i32> = (0..1000).map(|i| i % 7).collect();
        let none = of(&tags, &tags);
        assert_eq!(
            (none.count(), none.may_match(None, &tags), none.may_match(Some(3), &tags)),
            (0, false, false)
        );
        let lost = of(&[&tags[..], &[9]].concat(), &tags);
        assert_eq!((lost.count(), lost.all_have(9), lost.all_have(8)), (1, true, false));
        assert!(lost.may_match(None, &[]) && lost.may_match(Some(9), &[]) && !lost.may_match(Some(1), &[]));
        let several = of(&[4, 4, 4, 4], &[4]);
        assert!(several.may_match(Some(4), &[5]) && !several.may_match(Some(5), &[5, 4]));
        assert!(several.may_match(Some(5), &[5]), "the tag of these messages is not known");
        let two = of(&[4, 5, 5, 1], &[1]);
        assert!(!two.may_match(Some(6), &[1, 4, 5]) && two.may_match(Some(5), &[1, 4, 5]));
        assert!(of(&[4, 5, 1], &[]).may_match(Some(6), &[1, 4, 5]), "of several tags");
        assert!(of(&[4, 5], &[]).may_match(Some(6), &[4]), "the tag of one of the two is not known");
        let foreign = of(&[4], &[4, 4]);
        assert_eq!((foreign.count(), foreign.may_match(None, &[])), (-1, false));
    }

    #[test]
    fn what_may_be_received_as_another_type_is_no_difference() {
        assert_eq!(meaning(Dtype::Int32), meaning(Dtype::Uint32));
        assert_eq!(meaning(Dtype::Complex64), meaning(Dtype::Float32));
        assert_ne!(meaning(Dtype::Float16), meaning(Dtype::Bfloat16));
        assert_ne!(meaning(Dtype::Int32), meaning(Dtype::Float32));
        let comm = Arc::new(Comm::new("forms", 0, 2));
        let form = |words: &str| {
            let forms = Forms { sent: words.into(), boundary: "f(x)".into(), ..Forms::default() };
            form(&Site { forms, ..Site::new(Op::Allreduce, &comm) })
        };
        let (one, other) = (form("['a'] (3)"), form("['b'] (3)"));
        assert!(
            are_forms_equal(one, form("['a'] (3)"))
                && !are_forms_equal(one, other)
                && are_forms_equal(one, 0)
        );
    }
}
