//! Many ranks on many hosts, as states: what the leaders ask and decide, with messages that take their time, ranks and hosts that
//! are gone. The decisions and the questions are those of the ranks; MPI, files and threads are left out.
//!
//! `MPI4JAX_SIMULATION=800x125 cargo test --release simulation` runs it with so many hosts and ranks on each.

use super::*;
use crate::watch::graph::{CommId, Peer};
use crate::watch::groups::{Group, grouped};
use crate::watch::known;
use crate::watch::mail::{Hosts, Mail, Message};
use crate::watch::questions::Kind;

/// How long a message takes, and how often a leader looks for some: seconds.
const STEP: f64 = 0.25;

struct Host {
    ranks: Ranks,
    mail: Mail,
    state: State,
    /// What its ranks wait for, from 0 on.
    here: World,
    far: World,
    question: Option<(String, f64, bool)>,
}

struct Job {
    hosts: Vec<Host>,
    under_way: Vec<(i32, i32, Message)>,
    now: f64,
    /// Hosts that nothing reaches, and ranks that carry no messages.
    cut_off: Vec<usize>,
    dead: Vec<i32>,
    messages: usize,
    bytes: usize,
    asks: Vec<(usize, f64)>,
    lines: Vec<(usize, f64)>,
    ends: Vec<(usize, f64, Reason)>,
}

fn size() -> (i32, i32) {
    let setting = std::env::var("MPI4JAX_SIMULATION").unwrap_or("40x25".into());
    let (hosts, ranks) = setting.split_once('x').expect("HOSTSxRANKS");
    (hosts.parse().unwrap(), ranks.parse().unwrap())
}

impl Job {
    fn new((hosts, per_host): (i32, i32), rank: impl Fn(i32) -> Rank) -> Self {
        let names: Vec<u64> = (0..hosts * per_host).map(|rank| 1 + (rank / per_host) as u64).collect();
        let host = |host: i32| {
            let first = host * per_host;
            let ranks: Ranks = (first..first + per_host).collect();
            let state = State { own: ranks.clone(), ..State::default() };
            let mut mail = Mail::default();
            mail.hosts = Hosts::new(&names, first);
            let here = ranks.iter().map(|it| (it, rank(it))).collect();
            Host { ranks, mail, state, here, far: World::new(), question: None }
        };
        Self {
            hosts: (0..hosts).map(host).collect(),
            under_way: Vec::new(),
            now: 0.0,
            cut_off: Vec::new(),
            dead: Vec::new(),
            messages: 0,
            bytes: 0,
            asks: Vec::new(),
            lines: Vec::new(),
            ends: Vec::new(),
        }
    }

    fn host_of(&self, rank: i32) -> usize {
        self.hosts.partition_point(|host| host.ranks.iter().last() < Some(rank))
    }

    fn here(&self, host: usize) -> World {
        let mut here = self.hosts[host].here.clone();
        here.values_mut().flat_map(|rank| &mut rank.waits).for_each(|wait| wait.seconds = self.now);
        here
    }

    fn step(&mut self) {
        self.now += STEP;
        for (from, to, message) in std::mem::take(&mut self.under_way) {
            let ends = [self.host_of(from), self.host_of(to)];
            self.messages += 1;
            self.bytes += message.encode().len();
            if ends.iter().any(|host| self.cut_off.contains(host)) || self.dead.contains(&to) {
                continue;
            }
            let host = &mut self.hosts[ends[1]];
            if let Some(word) = host.mail.take_in(from, message, self.now) {
                let state = |it: &Rank| {
                    if Kind::of(&word) == Some(Kind::Waits) {
                        known::encode(it, true)
                    } else {
                        "in it".into()
                    }
                };
                let here = self.here(ends[1]);
                let group = |(rank, it): (&i32, &Rank)| Group {
                    members: [*rank].into_iter().collect(),
                    state: state(it),
                    seconds: 0.0,
                };
                let groups = grouped(here.iter().map(group));
                self.under_way.push((to, from, Message::Answer { word, groups }));
            }
        }
        for host in 0..self.hosts.len() {
            self.decide(host);
            // Whoever leads the host: its first rank that carries messages.
            let leader = self.hosts[host].ranks.iter().find(|rank| !self.dead.contains(rank)).unwrap();
            let sent = self.hosts[host].mail.sent();
            self.under_way.extend(sent.into_iter().map(|(to, message)| (leader, to, message)));
        }
    }

    fn decide(&mut self, place: usize) {
        let here = self.here(place);
        let (now, count) = (self.now, self.hosts.len());
        let host = &mut self.hosts[place];
        if let Some((word, at, again)) = &mut host.question {
            let (groups, complete) = host.mail.answers(word);
            if !*again && now - *at > 1.5 {
                host.mail.ask_again();
                *again = true;
            }
            host.far = World::new();
            for group in groups {
                let rank = known::decode(&group.state).unwrap();
                host.far.extend(group.members.iter().map(|member| (member, rank.clone())));
            }
            if complete || now - *at > 3.0 {
                host.question = None;
            }
        }
        // As often as a leader looks whose ranks wait.
        if now.fract() != 0.0 || !host.state.reported.is_empty() {
            return;
        }
        host.state.world = here;
        host.state.world.extend(host.far.iter().map(|(rank, it)| (*rank, it.clone())));
        host.state.asked = host
            .mail
            .heard(Kind::Waits)
            .map(|(_, at)| at)
            .into_iter()
            .chain(host.state.asked)
            .reduce(f64::max);
        host.state.spoke = host
            .mail
            .heard(Kind::Line)
            .map(|(_, at)| at)
            .into_iter()
            .chain(host.state.spoke)
            .reduce(f64::max);
        let settings = Settings { report_after: 30.0, host: (place, count) };
        for action in decide(&host.state, &settings, now) {
            host.state.apply(&action, &settings, now);
            let word = |kind: &str| format!("{kind}-{place}-{now}");
            match action {
                Action::Ask => {
                    host.mail.ask(&word("waits"));
                    host.question = Some((word("waits"), now, false));
                    self.asks.push((place, now));
                }
                Action::Tell(_) => {
                    host.mail.ask(&word("line"));
                    self.lines.push((place, now));
                }
                Action::End(_, reason) => self.ends.push((place, now, reason)),
                _ => {}
            }
        }
    }

    fn run(&mut self, until: f64) {
        while self.now < until && self.ends.is_empty() {
            self.step();
        }
    }
}

const ALL: CommId = CommId { class: 1, index: 0 };

fn waits(need: Need, members: Ranks) -> Rank {
    let counts = if let Need::Collective { comm, number } = need { vec![(comm, number)] } else { Vec::new() };
    let words = "it, a.py:9".into();
    let wait = Wait {
        number: 9,
        need,
        members,
        seconds: 0.0,
        bytes: 4,
        late: String::new(),
        words,
        at: String::new(),
    };
    Rank { life: Life::Runs, waits: vec![wait], counts, ..Rank::default() }
}

fn slow() -> Rank {
    Rank { life: Life::Runs, ..Rank::default() }
}

/// All ranks wait for one that computes: the other hosts are asked at 3, 6, 12, ... seconds, by one or few, and one line is said.
#[test]
fn a_slow_rank_costs_few_messages() {
    let (hosts, per_host) = size();
    let n = hosts * per_host;
    let barrier = || waits(Need::Collective { comm: ALL, number: 5 }, Ranks::all(n));
    let mut job = Job::new((hosts, per_host), |rank| if rank == n / 2 { slow() } else { barrier() });
    job.run(70.0);
    assert_eq!(job.ends, []);
    println!("{} messages, {} bytes, asked {:?}, said {:?}", job.messages, job.bytes, job.asks, job.lines);
    assert_eq!(job.asks, [3.0, 6.0, 12.0, 24.0, 48.0].map(|at| (0, at)), "the first host alone asks");
    assert_eq!(job.lines, [31.0, 61.0].map(|at| (0, at)), "and speaks");
    assert_eq!(job.messages, 2 * 7 * (hosts as usize - 1), "a question and an answer for each other host");
}

/// Two ranks on two hosts receive from each other, on others ranks compute, and one host is cut off: the job ends.
#[test]
fn a_knot_of_two_hosts_is_found() {
    let (hosts, per_host) = size();
    let n = hosts * per_host;
    let recv = |from: i32| {
        let from = Some(Peer { rank: Some(from), tag: Some(7) });
        waits(Need::Message { comm: ALL, from, to: None }, Ranks::all(n))
    };
    let (a, b) = (per_host, (hosts - 1) * per_host + 1);
    let of = |rank: i32| {
        if rank == a {
            recv(b)
        } else if rank == b {
            recv(a)
        } else {
            slow()
        }
    };
    let mut job = Job::new((hosts, per_host), of);
    job.cut_off = vec![2];
    // The leader of the second one's host is gone from the network: its second rank answers.
    job.dead = vec![b - 1];
    job.run(30.0);
    let (_, at, reason) = &job.ends[0];
    assert!(matches!(reason, Reason::Proof(Why::Stuck(_))) && *at <= 15.0, "{:?} at {at}", reason);
    println!("{} messages, {} bytes, asked {:?}, ended at {at} s", job.messages, job.bytes, job.asks);
    // Where the ranks' hosts cannot be reached, nothing is proved.
    let mut job = Job::new((hosts, per_host), of);
    job.cut_off = vec![1];
    job.run(30.0);
    assert_eq!(job.ends, []);
}

/// Each rank of the job waits for the next one: the largest knot that there is, of which no two ranks say the same.
#[test]
fn a_ring_of_all_ranks_is_a_knot() {
    let (hosts, per_host) = size();
    let n = hosts * per_host;
    let recv = |rank: i32| {
        let from = Some(Peer { rank: Some((rank + 1) % n), tag: None });
        waits(Need::Message { comm: ALL, from, to: None }, Ranks::all(n))
    };
    let mut job = Job::new((hosts, per_host), recv);
    job.run(30.0);
    let (_, at, reason) = &job.ends[0];
    assert!(matches!(reason, Reason::Proof(Why::Stuck(_))) && *at <= 15.0, "{:?} at {at}", reason);
    println!("{} messages, {} bytes, ended at {at} s", job.messages, job.bytes);
    // With one of them that computes, it is none: all others may still be served, one after another.
    let mut job = Job::new((hosts, per_host), |rank| if rank == 3 { slow() } else { recv(rank) });
    job.run(20.0);
    assert_eq!(job.ends, []);
}
