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
        // First what hardly any rank has: of the others, nothing is read.
        let said = self.listed(&file(rank, "gone"))?;
        let process = self.process(rank)?;
        (Process::parse(&said)? == process).then(|| process.name())
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::time::Duration;

    use super::super::folder::{Folder, operations};
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

    /// Operations on the folder by each of these ranks, as they do what the watchdog has them do once a second.
    fn second(ranks: &[Peers], world: &[i32]) -> Vec<usize> {
        let one = |peers: &Peers| {
            let before = operations();
            peers.look();
            peers.watch_neighbour();
            let _ = peers.missing(world);
            operations() - before
        };
        ranks.iter().map(one).collect()
    }

    /// What a rank does while it waits, and when another one is killed, is the same for a hundred ranks and a thousand;
    /// and all of them learn of it within two looks.
    #[test]
    #[cfg(target_os = "linux")]
    fn ranks_of_one_folder_do_no_more_when_they_are_many() {
        let figures = [100, 1000].map(|size| {
            let base = std::env::temp_dir().join(format!("mpi4jax-many-{size}-{}", std::process::id()));
            let path = base.join("user/job");
            let ranks: Vec<Peers> = (0..size).map(|rank| Peers::new(path.clone(), rank, size)).collect();
            let (world, killed): (Vec<i32>, i32) = ((0..size).collect(), size / 2);
            // One of them has a process that can be killed.
            let mut child = std::process::Command::new("/bin/sleep").arg("1000").spawn().unwrap();
            let (own, pid) = (Process::own().to_string(), child.id());
            let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
            let start = stat.rsplit_once(") ").unwrap().1.split(' ').nth(19).unwrap().to_owned();
            let words: Vec<&str> = own.split(' ').collect();
            let line = format!("{pid} {} {start} {}\n{size}\n", words[1], words[3]);
            Folder::make(&path).unwrap().write(&file(killed, "pid"), "temporary", &line).unwrap();
            let alive: Vec<Peers> = ranks.into_iter().filter(|peers| peers.rank != killed).collect();
            second(&alive, &world);
            // Until the folder counts as settled.
            std::thread::sleep(Duration::from_millis(2100));
            second(&alive, &world);
            let quiet = second(&alive, &world);
            assert!(alive.iter().all(|peers| peers.missing(&world).is_none()));
            child.kill().unwrap();
            child.wait().unwrap();
            let noticed = [second(&alive, &world), second(&alive, &world)];
            let why = |peers: &Peers| peers.missing(&world);
            assert!(
                alive
                    .iter()
                    .all(|peers| why(peers).is_some_and(|why| why.contains(&format!("rank {killed},"))))
            );
            fs::remove_dir_all(base).unwrap();
            [quiet, noticed[0].clone(), noticed[1].clone()].map(|counts| counts.into_iter().max())
        });
        assert_eq!(figures[0], figures[1], "of a hundred ranks, and of a thousand");
        assert_eq!(figures[0][0], Some(1), "one look at the folder");
    }
}
