//! Each rank watches the next one's process, and tells all if it ends: so a rank has one to look at, however many there
//! are.

use super::peers::{Peers, file};
use super::process::Process;

impl Peers {
    /// Looks at the next rank whose process can be seen from here and runs. For those before it that do not, there
    /// is a file then.
    pub fn watch_neighbour(&self) {
        for next in (1..self.size).map(|distance| (self.rank + distance) % self.size) {
            let Some(process) = self.process(next) else { continue };
            if self.has_finished(next) || self.gone(next).is_some() || !self.process.sees(&process) {
                continue;
            }
            if self.process.knows_gone(&process) {
                // It may have finished just before.
                self.look();
                if !self.has_finished(next) {
                    let _ = self.write(&file(next, "gone"), &process.to_string());
                }
            } else if !self.process.knows_stopped(&process) {
                return; // and it watches those behind it
            }
        }
    }

    /// How a rank's process is named, if it has certainly ended although it has not finished.
    pub fn gone(&self, rank: i32) -> Option<String> {
        let process = self.process(rank)?;
        let said = self.listed(&file(rank, "gone"))?;
        (Process::parse(&said)? == process).then(|| process.name())
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::super::folder::Folder;
    use super::*;

    /// Of ranks 0 to 3, which all have files, rank 0 finds out that 1 and 2 are gone.
    #[test]
    #[cfg(target_os = "linux")]
    fn what_a_rank_finds_out_all_know() {
        let base = std::env::temp_dir().join(format!("mpi4jax-neighbour-{}", std::process::id()));
        let path = base.join("user/job");
        let folder = Folder::make(&path).unwrap();
        let own = Process::own().to_string();
        let words: Vec<&str> = own.split(' ').collect();
        // A process of this number that was started at another time.
        let ended = format!("{} {} 1 {}\n4\n", words[0], words[1], words[3]);
        for rank in [1, 2] {
            folder.create(&file(rank, "pid"), &ended).unwrap();
        }
        folder.create("rank3.pid", &format!("{own}\n4\n")).unwrap();
        let ranks = [0, 3].map(|rank| Peers::new(path.clone(), rank, 4));
        let _ = ranks.each_ref().map(Peers::look);
        assert_eq!(ranks.each_ref().map(|peers| peers.gone(1)), [None, None]);
        ranks[0].watch_neighbour();
        for peers in &ranks {
            peers.look();
            assert!(peers.gone(1).is_some() && peers.gone(2).is_some() && peers.gone(3).is_none());
        }
        fs::remove_dir_all(base).unwrap();
    }
}
