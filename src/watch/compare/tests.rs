use super::*;

#[test]
fn records_differ_in_what_all_ranks_must_have_alike() {
    let comm = comm::register(Comm::new("kind-of", 0, 2));
    let with_two_roots =
        |op| [0, 1].map(|root| recorder::record_in_test(Site { root, ..Site::new(op, &comm) }));
    let [one, other] = with_two_roots(Op::Bcast);
    assert_ne!(kind_of(&one), kind_of(&other), "roots");
    let [one, other] = with_two_roots(Op::Allgatherv);
    assert_eq!(kind_of(&one), kind_of(&Record { count: 7, ..other }), "sizes that each rank chooses");
    let [one, other] = with_two_roots(Op::Allreduce);
    assert_eq!(kind_of(&one), kind_of(&other), "there is no root");
    assert_ne!(kind_of(&one), kind_of(&Record { count: 7, ..other }), "sizes");
}

#[test]
fn the_first_collectives_that_differ_are_named() {
    let comm = comm::register(Comm::new("first-difference", 0, 2));
    let records = |roots: [i32; 4]| -> Vec<Record> {
        let record = |(sequence, root)| {
            let site = Site { root, ..Site::new(Op::Bcast, &comm) };
            Record { sequence, ..recorder::record_in_test(site) }
        };
        (1..).zip(roots).map(record).collect()
    };
    let (own, its) = (records([0, 0, 1, 1]), records([0, 0, 0, 0]));
    let [one, other] = first_difference(&own, &its).unwrap();
    assert!(one.contains("bcast #3 (root 1)") && other.contains("bcast #3 (root 0)"), "{one}, {other}");
    assert_eq!(first_difference(&own[..2], &its), None);
    assert_eq!(first_difference(&own[2..], &its[..2]), None, "there is no collective to compare with");
}
