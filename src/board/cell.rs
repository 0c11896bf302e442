//! The collectives of a communicator, which a rank notes and its neighbors compare.

use crate::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

/// How many entries a communicator has for its last collectives.
pub const PRINTS: usize = 12;
/// How many of the entries are used, in the order in which this is tried. If a program repeats a sequence of collectives whose length divides
/// this number, no entry changes. Sequences of 1, 2, 3, 4, 6 and 12 collectives need no second try.
const PERIODS: [u64; 6] = [12, 10, 8, 9, 7, 11];
/// After how many changes of entries the next period is tried, at first and at most.
const PATIENCE: [u32; 2] = [24, 400];
/// How many bits of an entry are the number of a collective: at 0.5 us each, they last for 4 years.
const SINCE: u32 = 48;

/// The communicator was freed.
pub const FREED: u32 = 1;
/// Several threads have used the communicator at the same time, so numbers mean nothing.
pub const THREADS: u32 = 2;
/// Ranks may confuse the communicator with another one, so nothing is compared.
pub const MIXED: u32 = 4;
/// A difference was not certain: ranks may also use the communicator through mpi4py, and their numbers may be shifted.
pub const DOUBT: u32 = 8;

/// The collectives of a communicator.
///
/// Neighbors read all cache lines but the last one in each collective. A line that one core writes and another core reads is
/// transferred twice, which takes as long as a small collective if the cores share no cache. So a collective writes only to the last
/// line, and to an entry only if the entry changes: while a program repeats its collectives, no line is transferred. Neighbors read
/// the last line only if collectives differ, or if some were not compared.
#[repr(C, align(64))]
#[derive(Default)]
pub struct Cell {
    /// What its ranks know the communicator by; 0: the cell is free.
    pub id: AtomicU64,
    pub class: AtomicU64,
    pub origin: AtomicU64,
    pub name: AtomicU64,
    /// [`FREED`], [`THREADS`], [`MIXED`], [`DOUBT`].
    pub flags: AtomicU32,
    /// Twice the number of periods that were tried before, plus 1 while the period changes.
    tries: AtomicU32,
    /// Entry n % period describes collective n. The first number is the hash of what must be equal on all ranks. The lower bits of the
    /// second one are the number of the collective since which the entry has not changed, and its upper bits are a hash of the names
    /// and shapes of the leaves. The second number is 0 while the entry is written.
    prints: [[AtomicU64; 2]; PRINTS],
    own: NewLine,
    /// How many collectives, and how many messages, this rank has begun.
    pub number: AtomicU64,
    pub messages: AtomicU64,
    /// The number of the last collective that has ended: less than `number` while one runs.
    ended: AtomicU64,
    /// A bit for each neighbor with which a collective could not be compared, because one of the ranks was far ahead.
    pub unchecked: AtomicU32,
    /// How many entries have changed since this number of collectives, and how many may before the next period is tried.
    changes: AtomicU32,
    patience: AtomicU32,
    counted_from: AtomicU64,
    /// Entry n % 2 is the hash of all collectives up to n.
    pasts: [AtomicU64; 2],
}

/// The next field begins a new cache line.
#[repr(C, align(64))]
#[derive(Default)]
pub struct NewLine;

/// What a rank has begun on a communicator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Print {
    pub print: u64,
    pub form: u64,
}

impl Cell {
    /// Makes it the cell of another communicator, whose id the caller stores at last.
    pub fn clear(&self) {
        self.id.store(u64::MAX, Ordering::Relaxed);
        for number in [&self.number, &self.messages, &self.ended, &self.counted_from] {
            number.store(0, Ordering::Relaxed);
        }
        for number in [&self.flags, &self.unchecked, &self.tries, &self.changes, &self.patience] {
            number.store(0, Ordering::Relaxed);
        }
        let numbers = self.pasts.iter().chain(self.prints.as_flattened());
        numbers.for_each(|number| number.store(0, Ordering::Relaxed));
    }

    /// Notes a collective before it runs, and returns its number. If another collective runs, the numbers mean nothing.
    ///
    /// Two ranks note their collectives, and then each looks at the [`Self::print`] of the other. If the collectives differ, at least
    /// one of the ranks sees the difference, because the stores to entries and numbers, and the loads of both, are sequentially
    /// consistent.
    #[inline(always)]
    pub fn note(&self, print: u64, form: u64) -> u64 {
        let number = self.number.load(Ordering::Relaxed) + 1;
        let [its_print, its_since] = self.place(number, self.tries.load(Ordering::Relaxed));
        let (since, form) = (its_since.load(Ordering::Relaxed), short(form));
        if since == 0 || since >> SINCE != form || its_print.load(Ordering::Relaxed) != print {
            let [its_print, its_since] = self.place(number, self.count_change(number));
            its_since.store(0, Ordering::Relaxed);
            // Who reads the new print also reads that the entry is being written.
            fence(Ordering::Release);
            its_print.store(print, Ordering::Relaxed);
            its_since.store(form << SINCE | number, Ordering::SeqCst);
        }
        let [even, odd] = &self.pasts;
        let (before, after) = if number % 2 == 0 { (odd, even) } else { (even, odd) };
        // Who reads the new hash also reads the number of the collective before.
        after.store(mix(before.load(Ordering::Relaxed), print), Ordering::Release);
        let number = self.number.fetch_add(1, Ordering::SeqCst) + 1;
        // All collectives before have ended, unless another thread is in one.
        if self.ended.load(Ordering::Relaxed) + 1 != number {
            self.set(THREADS);
        }
        number
    }

    /// A collective that was noted has ended.
    #[inline(always)]
    pub fn end(&self, number: u64) {
        self.ended.store(number, Ordering::Release);
    }

    /// Whether a collective runs; unknown if the cell has [`THREADS`].
    pub fn is_running(&self) -> bool {
        self.number.load(Ordering::Acquire) != self.ended.load(Ordering::Acquire)
    }

    #[inline(always)]
    fn place(&self, number: u64, tries: u32) -> &[AtomicU64; 2] {
        // The compiler knows how to divide by the first period without a division.
        let place = if tries < 2 {
            number % PERIODS[0]
        } else {
            number % PERIODS[tries as usize / 2 % PERIODS.len()]
        };
        &self.prints[place as usize]
    }

    /// An entry is about to change. If most collectives have changed one, the program does not repeat itself with this period: then the
    /// next one is tried, and all entries are lost. Returns `tries`.
    fn count_change(&self, number: u64) -> u32 {
        let (tries, order) = (self.tries.load(Ordering::Relaxed), Ordering::Relaxed);
        let (changes, patience) = (self.changes.load(order) + 1, self.patience.load(order).max(PATIENCE[0]));
        self.changes.store(changes, order);
        if changes < patience {
            return tries;
        }
        let all = number - self.counted_from.load(order);
        self.counted_from.store(number, order);
        self.changes.store(0, order);
        if all > 2 * u64::from(changes) {
            self.patience.store(0, order);
            return tries;
        }
        self.patience.store((2 * patience).min(PATIENCE[1]), order);
        self.tries.store(tries.wrapping_add(1), Ordering::SeqCst);
        // Who reads that an entry is empty, or what is written there next, also reads that the period has changed.
        fence(Ordering::Release);
        self.prints.iter().for_each(|[_, since]| since.store(0, order));
        self.tries.store(tries.wrapping_add(2), Ordering::SeqCst);
        tries.wrapping_add(2)
    }

    /// The entry of a collective. If the rank has not come to the collective, the entry may still change. `None`: the rank is far
    /// ahead, and the entry describes a later collective, or it is being written.
    #[inline(always)]
    fn entry(&self, number: u64) -> Option<Print> {
        let tries = self.tries.load(Ordering::SeqCst);
        let [print, since] = self.place(number, tries);
        let before = since.load(Ordering::SeqCst);
        let found = Print { print: print.load(Ordering::Acquire), form: before >> SINCE };
        let is_known = tries % 2 == 0 && before != 0 && before & ((1 << SINCE) - 1) <= number;
        let is_whole = since.load(Ordering::Relaxed) == before && self.tries.load(Ordering::Relaxed) == tries;
        (is_known && is_whole).then_some(found)
    }

    /// Whether the entry of a collective equals this print. If the entry changes later, the rank that changes it sees the difference.
    #[inline(always)]
    pub fn repeats(&self, number: u64, print: &Print) -> bool {
        self.entry(number) == Some(*print)
    }

    /// What was noted of a collective. `None`: the rank has not come to it, or is far ahead.
    pub fn print(&self, number: u64) -> Option<Print> {
        if self.has_come(number) { self.entry(number) } else { None }
    }

    /// Whether the rank has come to a collective.
    pub fn has_come(&self, number: u64) -> bool {
        self.number.load(Ordering::SeqCst) >= number
    }

    /// The hash of all collectives up to this one, if it is the last one that the rank has begun.
    pub fn past(&self, number: u64) -> Option<u64> {
        let is_last = |order| self.number.load(order) == number;
        let found =
            is_last(Ordering::Acquire).then(|| self.pasts[number as usize % 2].load(Ordering::Acquire));
        found.filter(|_| is_last(Ordering::Relaxed))
    }

    /// The hash of all collectives up to the last one of this rank, or up to the one before. Only the thread that notes may ask.
    pub fn own_past(&self, number: u64) -> u64 {
        self.pasts[number as usize % 2].load(Ordering::Relaxed)
    }

    #[inline]
    pub fn has(&self, flag: u32) -> bool {
        self.flags.load(Ordering::Relaxed) & flag != 0
    }

    pub fn set(&self, flag: u32) {
        self.flags.fetch_or(flag, Ordering::Relaxed);
    }
}

/// The upper bits of a hash that fit beside a number of `SINCE` bits; 0 only if the hash is 0.
fn short(hash: u64) -> u64 {
    if hash == 0 { 0 } else { (hash >> SINCE).max(1) }
}

/// A hash of two numbers.
#[inline(always)]
pub const fn mix(a: u64, b: u64) -> u64 {
    let product = ((a ^ 0x9e37_79b9_7f4a_7c15) as u128).wrapping_mul((b ^ 0xd1b5_4a32_d192_ed03) as u128);
    (product as u64) ^ (product >> 64) as u64
}
