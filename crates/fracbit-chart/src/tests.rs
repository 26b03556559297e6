use super::*;

fn chart<'a>(series: Vec<Series<'a>>, title: &'a str) -> Chart<'a> {
    let axis = |label, scale| Axis { label, scale };
    let (x, y) = (axis("bits", Scale::Linear), axis("loss", Scale::Logarithmic));
    Chart { title, x, y, series, limit: None }
}

/// Whether tags nest and close, and no text holds what belongs to tags.
fn well_formed(svg: &str) -> bool {
    let mut open = Vec::new();
    let mut rest = svg;
    while let Some(from) = rest.find('<') {
        if rest[..from].contains('>') {
            return false;
        }
        let Some(until) = rest[from..].find('>') else { return false };
        let tag = &rest[from + 1..from + until];
        let name = |tag: &str| tag.split([' ', '/']).find(|n| !n.is_empty()).unwrap_or_default().to_owned();
        if tag.starts_with('/') {
            if open.pop() != Some(name(tag)) {
                return false;
            }
        } else if !tag.ends_with('/') {
            open.push(name(tag));
        }
        if !tag.matches('"').count().is_multiple_of(2) {
            return false;
        }
        rest = &rest[from + until + 1..];
    }
    open.is_empty() && !rest.contains('>')
}

#[test]
fn files_and_figures_are_well_formed_whatever_the_texts() {
    let title = "a <b> & \"c\" \u{1}";
    let points = || vec![Point::from((1.0, 0.1)).titled(title.to_owned()), (2.0, 0.01).into()];
    let chart = chart(vec![Series::line(title, points()), Series::dots("dots", points())], title);
    for svg in [chart.file(), chart.figure()] {
        assert!(well_formed(&svg), "{svg}");
        assert!(!svg.contains("<b>") && svg.contains("a &lt;b&gt; &amp; &quot;c&quot;"), "{svg}");
        assert_eq!((svg.matches("<circle").count(), svg.matches("<polyline").count()), (4, 1));
    }
    assert!(!well_formed("<svg><text></svg>") && !well_formed("<a b=\"></a>"));
}

#[test]
fn values_without_a_place_are_left_out() {
    let points = vec![(1.0, 0.5).into(), (2.0, 0.0).into(), (f64::NAN, 1.0).into(), (3.0, 0.1).into()];
    let svg = chart(vec![Series::line("s", points)], "t").figure();
    assert_eq!(svg.matches("<circle").count(), 2);
    let drawn = svg.split("points=\"").nth(1).and_then(|s| s.split('"').next()).unwrap();
    assert_eq!(drawn.split(' ').count(), 2, "{drawn}");
    assert!(well_formed(&chart(Vec::new(), "t").file()));
}

#[test]
fn greater_values_lie_higher_and_further_right() {
    let svg = chart(vec![Series::dots("s", vec![(1.0, 0.1).into(), (2.0, 0.2).into()])], "t").figure();
    let values = |name: &str| -> Vec<f64> {
        svg.split(name).skip(1).map(|s| s.split('"').next().unwrap().parse().unwrap()).collect()
    };
    let (x, y) = (values(" cx=\""), values(" cy=\""));
    assert!(x[0] < x[1] && y[0] > y[1], "{x:?} {y:?}");
}

#[test]
fn a_limit_and_labels_are_written_where_there_is_room() {
    let point = |x, y| Point { title: "tcq-2, 2 bits".to_owned(), labelled: true, ..Point::from((x, y)) };
    let same = [0.1, 0.1001, 0.1002, 0.1003, 0.1004, 0.1005].map(|y| point(3.0, y));
    let points = [&same[..], &[point(1.0, 0.5), (5.0, 0.9).into()]].concat();
    let svg = Chart { limit: Some(2.0), ..chart(vec![Series::dots("s", points)], "t") }.file();
    assert!(svg.contains("class=\"limit\""));
    let labels: Vec<f64> = svg
        .lines()
        .filter(|line| line.ends_with(">tcq-2</text>"))
        .filter_map(|line| line.split("x=\"").nth(1)?.split('"').next()?.parse().ok())
        .collect();
    assert!((3..=5).contains(&labels.len()), "at one place only some have room: {labels:?}");
    assert!(labels.iter().all(|&x| x > 76.0), "none over the axis: {labels:?}");
}

#[test]
fn legends_take_as_many_rows_as_they_need() {
    let names: Vec<String> = (0..30).map(|i| format!("a series with a long name {i}")).collect();
    let series = names.iter().map(|n| Series::line(n, vec![(1.0, 1.0).into()])).collect();
    let svg = chart(series, "t").file();
    let rows: std::collections::BTreeSet<&str> = svg
        .lines()
        .filter(|l| l.contains("a series") && l.contains("<text"))
        .filter_map(|l| l.split("y=\"").nth(1)?.split('"').next())
        .collect();
    assert!(rows.len() >= 6, "{rows:?}");
}
