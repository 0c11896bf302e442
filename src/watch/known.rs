//! What a rank tells the others of what it waits for, as text: lines of fields between tabs.

use std::str::SplitAsciiWhitespace;

use super::graph::{CommId, Life, Need, Peer, Rank, Wait};
use super::ranks::Ranks;

/// What is one word in the text.
fn peer(peer: Option<Peer>) -> String {
    let number = |it: Option<i32>| it.map_or("*".into(), |it| it.to_string());
    peer.map_or("-".into(), |Peer { rank, tag }| format!("{}:{}", number(rank), number(tag)))
}

fn parse_peer(text: &str) -> Option<Option<Peer>> {
    if text == "-" {
        return Some(None);
    }
    let number = |text: &str| if text == "*" { Some(None) } else { text.parse().ok().map(Some) };
    let (rank, tag) = text.split_once(':')?;
    Some(Some(Peer { rank: number(rank)?, tag: number(tag)? }))
}

fn need(need: &Need) -> String {
    let comm = |comm: &CommId| format!("{:x} {}", comm.class, comm.index);
    match need {
        Need::Collective { comm: id, number } => format!("collective {} {number}", comm(id)),
        Need::Message { comm: id, from, to } => format!("message {} {} {}", comm(id), peer(*from), peer(*to)),
        Need::Call => "call".into(),
        Need::End => "end".into(),
        Need::Stream => "stream".into(),
    }
}

fn parse_comm(words: &mut SplitAsciiWhitespace) -> Option<CommId> {
    Some(CommId { class: u64::from_str_radix(words.next()?, 16).ok()?, index: words.next()?.parse().ok()? })
}

fn parse_need(text: &str) -> Option<Need> {
    let mut words = text.split_ascii_whitespace();
    Some(match words.next()? {
        "collective" => {
            Need::Collective { comm: parse_comm(&mut words)?, number: words.next()?.parse().ok()? }
        }
        "message" => Need::Message {
            comm: parse_comm(&mut words)?,
            from: parse_peer(words.next()?)?,
            to: parse_peer(words.next()?)?,
        },
        "call" => Need::Call,
        "end" => Need::End,
        "stream" => Need::Stream,
        _ => return None,
    })
}

/// On one line, whatever it was.
fn line(text: &str) -> String {
    text.replace(['\t', '\n', '\r'], " ")
}

fn life(life: &Life) -> String {
    match life {
        Life::Runs => "runs".into(),
        Life::Stopped => "stopped".into(),
        Life::Finished => "finished".into(),
        Life::Gone(name) => format!("gone {}", line(name)),
        Life::Unknown => "unknown".into(),
    }
}

fn parse_life(text: &str) -> Option<Life> {
    Some(match text.split_once(' ').unwrap_or((text, "")) {
        ("runs", _) => Life::Runs,
        ("stopped", _) => Life::Stopped,
        ("finished", _) => Life::Finished,
        ("gone", name) => Life::Gone(name.into()),
        ("unknown", _) => Life::Unknown,
        _ => return None,
    })
}

/// What a rank waits for. `rounded`: waits that began in one second have one text.
pub fn encode(rank: &Rank, rounded: bool) -> String {
    let other = rank.other.as_deref().map_or("-".into(), line);
    let mut text = format!("life\t{}\nother\t{other}\n", life(&rank.life));
    for (comm, count) in &rank.counts {
        text += &format!("count\t{:x} {} {count}\n", comm.class, comm.index);
    }
    for started in &rank.started {
        text += &format!("started\t{}\n", need(started));
    }
    for wait in &rank.waits {
        let Wait { number, members, seconds, bytes, late, words, at, .. } = wait;
        let seconds = if rounded { seconds.floor() } else { *seconds };
        text += &format!(
            "wait\t{number}\t{seconds:.2}\t{bytes}\t{members}\t{}\t{}\t{}\t{}\n",
            need(&wait.need),
            line(late),
            line(words),
            line(at)
        );
    }
    text
}

fn parse_wait(fields: &str) -> Option<Wait> {
    let mut fields = fields.split('\t');
    Some(Wait {
        number: fields.next()?.parse().ok()?,
        seconds: fields.next()?.parse().ok()?,
        bytes: fields.next()?.parse().ok()?,
        members: Ranks::parse(fields.next()?)?,
        need: parse_need(fields.next()?)?,
        late: fields.next()?.into(),
        words: fields.next()?.into(),
        at: fields.next()?.into(),
    })
}

/// None for what no [`encode`] has made.
pub fn decode(text: &str) -> Option<Rank> {
    let mut rank = Rank::default();
    for line in text.lines() {
        let (kind, rest) = line.split_once('\t')?;
        match kind {
            "life" => rank.life = parse_life(rest)?,
            "other" => rank.other = (rest != "-").then(|| rest.to_owned()),
            "count" => {
                let mut words = rest.split_ascii_whitespace();
                rank.counts.push((parse_comm(&mut words)?, words.next()?.parse().ok()?));
            }
            "started" => rank.started.push(parse_need(rest)?),
            "wait" => rank.waits.push(parse_wait(rest)?),
            _ => return None,
        }
    }
    Some(rank)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_told_is_what_is_known() {
        let comm = CommId { class: 0xabc, index: 7 };
        let end = |rank, tag| Some(Peer { rank, tag });
        let wait = |number, need| Wait {
            number,
            need,
            members: [0, 1, 5].into_iter().collect(),
            seconds: 4.25,
            bytes: 12,
            late: String::new(),
            words: "recv from 1, tag 7".into(),
            at: "a b.py:9 in f".into(),
        };
        let rank = Rank {
            other: Some("a thread at a.py:9 in f".into()),
            waits: vec![
                wait(3, Need::Collective { comm, number: 5 }),
                wait(4, Need::Message { comm, from: end(None, None), to: end(Some(2), Some(7)) }),
                wait(5, Need::Call),
            ],
            started: vec![Need::Message { comm, from: None, to: end(Some(1), Some(0)) }],
            counts: vec![(comm, 5), (CommId { class: 1, index: -1 }, 2)],
            ..Rank::default()
        };
        for life in [Life::Runs, Life::Stopped, Life::Finished, Life::Gone("process 1 on x".into())] {
            let rank = Rank { life, ..rank.clone() };
            assert_eq!(decode(&encode(&rank, false)), Some(rank));
        }
        assert_eq!(decode(&encode(&rank, true)).unwrap().waits[0].seconds, 4.0);
        assert_eq!(decode(&encode(&Rank::default(), false)), Some(Rank::default()));
        for broken in ["x", "wait\t1\t2", "started\tmessage 1 0 x -", "count\tzz 1 1"] {
            assert_eq!(decode(broken), None, "{broken}");
        }
    }
}
