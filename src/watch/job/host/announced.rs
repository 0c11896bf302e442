//! What ranks announce to each other before a line runs for the first time.

use std::sync::Arc;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::{COMPARE, HostFolder, file};
use crate::system::folder::Folder;

/// How much is read of what a rank was about to do: some 20 samples.
const READ_BYTES: u64 = 4096;

impl HostFolder {
    /// The last samples of what a rank was about to do.
    pub fn announced<T: DeserializeOwned>(&self, rank: i32) -> Vec<T> {
        let read = |folder: Arc<Folder>| folder.read_end(&file(rank, "announced"), READ_BYTES);
        let found = self.folder().ok().and_then(read).filter(|(_, written)| *written >= self.since);
        let text = found.map_or_else(String::new, |(text, _)| text);
        text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
    }

    /// Adds a sample to those.
    pub fn announce(&self, sample: &impl Serialize) {
        if let (Ok(folder), Ok(text)) = (self.folder(), serde_json::to_string(sample)) {
            let _ = folder.append(&file(self.rank, "announced"), &(text + "\n"));
        }
    }

    /// Wakes the watchdog of a rank, which compares what it did with others.
    pub fn ask_to_compare(&self, rank: i32) {
        self.notify(rank, COMPARE);
    }

    /// Whether another rank has asked this one to compare.
    pub fn is_asked_to_compare(messages: &[u8]) -> bool {
        messages.chunks_exact(4).any(|bytes| bytes == COMPARE.to_ne_bytes())
    }
}
