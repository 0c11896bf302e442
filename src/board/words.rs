//! Words on the board: some that change, and the last ones that records refer to.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, LazyLock, Mutex};

use crate::sync::atomic::{AtomicU8, AtomicU32, Ordering, fence};
use crate::sync::lock;

/// How many bytes of words are on the board, how many words may have at most, and how many of them are found.
const BYTES: usize = 12 << 10;
const LONGEST: usize = 3 << 10;
const PLACES: usize = 512;
/// The number and the length of words stand before them.
const HEAD: usize = 6;
/// How many words this process remembers.
const MOST: usize = 8192;

/// Words that change atomically.
#[repr(C)]
pub struct Words<const N: usize> {
    /// Odd while they are written.
    turn: AtomicU32,
    length: AtomicU32,
    bytes: [AtomicU8; N],
}

impl<const N: usize> Default for Words<N> {
    fn default() -> Self {
        let (turn, length) = (AtomicU32::default(), AtomicU32::default());
        Self { turn, length, bytes: std::array::from_fn(|_| AtomicU8::default()) }
    }
}

impl<const N: usize> Words<N> {
    /// Writes words. Only one thread of the rank may write them at a time.
    pub fn write(&self, words: &str) {
        let mut length = words.len().min(N);
        while !words.is_char_boundary(length) {
            length -= 1;
        }
        self.turn.fetch_add(1, Ordering::Relaxed);
        // Who reads a new byte also reads that the words are being written.
        fence(Ordering::Release);
        self.length.store(length as u32, Ordering::Relaxed);
        for (place, byte) in self.bytes.iter().zip(&words.as_bytes()[..length]) {
            place.store(*byte, Ordering::Relaxed);
        }
        self.turn.fetch_add(1, Ordering::Release);
    }

    /// The words, unless they change just now.
    pub fn read_once(&self) -> Option<String> {
        let before = self.turn.load(Ordering::Acquire);
        let length = (self.length.load(Ordering::Acquire) as usize).min(N);
        let bytes: Vec<u8> = self.bytes[..length].iter().map(|byte| byte.load(Ordering::Acquire)).collect();
        let is_whole = before % 2 == 0 && self.turn.load(Ordering::Relaxed) == before;
        is_whole.then(|| String::from_utf8_lossy(&bytes).into_owned())
    }

    pub fn read(&self) -> String {
        for _ in 0..100 {
            if let Some(words) = self.read_once() {
                return words;
            }
            std::thread::yield_now();
        }
        String::new()
    }
}

/// The last words of a rank, which its records refer to by number.
#[repr(C)]
pub struct Text {
    /// How many bytes have been written.
    end: AtomicU32,
    /// Where the words of number n begin, in entry n % PLACES.
    places: [AtomicU32; PLACES],
    bytes: [AtomicU8; BYTES],
}

impl Text {
    /// Writes words over the oldest ones, without control characters, which could forge lines of a report.
    fn write(&self, number: u32, words: &str) {
        static WRITING: Mutex<()> = Mutex::new(());
        let plain = printable(words);
        let bytes = &plain.as_bytes()[..plain.len().min(LONGEST)];
        let _writing = lock(&WRITING);
        // Position 0 stands for no words.
        let begin = self.end.load(Ordering::Relaxed).max(1);
        self.end.store(begin.wrapping_add((HEAD + bytes.len()) as u32), Ordering::Relaxed);
        // Who reads a new byte also reads the new end.
        fence(Ordering::Release);
        let length = (bytes.len() as u16).to_le_bytes();
        for (i, byte) in number.to_le_bytes().iter().chain(&length).chain(bytes).enumerate() {
            self.bytes[(begin as usize + i) % BYTES].store(*byte, Ordering::Relaxed);
        }
        self.places[number as usize % PLACES].store(begin, Ordering::Release);
    }

    /// Some bytes of the words of a number, from a position on.
    fn at<const N: usize>(&self, number: u32, from: usize) -> [u8; N] {
        let begin = self.places[number as usize % PLACES].load(Ordering::Acquire) as usize + from;
        std::array::from_fn(|i| self.bytes[(begin + i) % BYTES].load(Ordering::Acquire))
    }

    /// Whether the words of a number are there, and no more than `distance` bytes before the end.
    fn has(&self, number: u32, distance: usize) -> bool {
        let begin = self.places[number as usize % PLACES].load(Ordering::Acquire);
        let age = || self.end.load(Ordering::Relaxed).wrapping_sub(begin) as usize;
        begin != 0
            && age() <= distance
            && u32::from_le_bytes(self.at(number, 0)) == number
            && age() <= distance
    }

    /// The words of a number; none if others have taken their place.
    pub fn read(&self, number: u32) -> String {
        if !self.has(number, BYTES) {
            return String::new();
        }
        let length = usize::from(u16::from_le_bytes(self.at(number, 4))).min(LONGEST);
        let bytes: Vec<u8> = (0..length).map(|i| self.at::<1>(number, HEAD + i)[0]).collect();
        if self.has(number, BYTES) { String::from_utf8_lossy(&bytes).into_owned() } else { String::new() }
    }

    /// How many bytes have been written.
    #[cfg(test)]
    pub fn written(&self) -> u32 {
        self.end.load(Ordering::Relaxed)
    }

    /// Writes words of this process again if others have taken their place, or are about to.
    pub fn keep(&self, number: u32) {
        if number != 0 && !self.has(number, BYTES - LONGEST) {
            let words = lock(&KNOWN).words_of(number);
            words.inspect(|words| self.write(number, words));
        }
    }
}

/// The words of this process, each once. Of more than `MOST`, the oldest are forgotten.
struct Known {
    numbers: HashMap<Arc<str>, u32>,
    words: VecDeque<Arc<str>>,
}

static KNOWN: LazyLock<Mutex<Known>> =
    LazyLock::new(|| Mutex::new(Known { numbers: HashMap::new(), words: VecDeque::new() }));
/// The number of the oldest words that are known.
static FIRST: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(1);

impl Known {
    fn words_of(&self, number: u32) -> Option<Arc<str>> {
        let place = number.checked_sub(FIRST.load(Ordering::Relaxed))?;
        self.words.get(place as usize).cloned()
    }

    /// The number of words, and whether they are new.
    fn number_of(&mut self, words: Arc<str>) -> u32 {
        if let Some(&number) = self.numbers.get(&words) {
            return number;
        }
        if self.words.len() == MOST
            && let Some(oldest) = self.words.pop_front()
        {
            self.numbers.remove(&oldest);
            FIRST.fetch_add(1, Ordering::Relaxed);
        }
        let number = FIRST.load(Ordering::Relaxed) + self.words.len() as u32;
        self.words.push_back(words.clone());
        self.numbers.insert(words, number);
        number
    }
}

/// Words that records of this rank refer to.
#[derive(Debug, Default)]
pub struct Entry(std::sync::atomic::AtomicU32);

impl Entry {
    /// The number of the words, which are written when they are first used. Later the watchdog keeps them on the board as long as
    /// an operation that refers to them has not completed.
    #[inline]
    pub fn number(&self, text: &Text, words: impl FnOnce() -> String) -> u32 {
        let number = self.0.load(Ordering::Relaxed);
        if number >= FIRST.load(Ordering::Relaxed) {
            return number;
        }
        let number = lock(&KNOWN).number_of(words().into());
        text.keep(number);
        self.0.store(number, Ordering::Relaxed);
        number
    }
}

/// Words without characters that a terminal acts on.
pub fn printable(words: &str) -> String {
    let of = |c: char| if c.is_control() { c.escape_default().collect::<String>() } else { c.to_string() };
    words.chars().map(of).collect()
}
