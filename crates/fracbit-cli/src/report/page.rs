//! The page.

use super::{Point, Report};
use fracbit::{explain::Gain, plan::PlannedMatrix};
use fracbit_base::Bytes;
use fracbit_chart::{Axis, Chart, Scale, Series};
use fracbit_model::{LayerLinear, LinearId};
use std::{collections::BTreeMap, fmt::Write as _};

const STYLE: &str = "\
:root{--ink:#1b1f24;--soft:#59636e;--paper:#fff;--line:#d8dee4;--panel:#f6f8fa;--good:#0a7d55;--bad:#b3372f;--mark:#1f6feb}\
@media(prefers-color-scheme:dark){:root{--ink:#e6edf3;--soft:#9198a1;--paper:#0d1117;--line:#30363d;--panel:#161b22;--good:#3fb27f;--bad:#e5655d;--mark:#5b9dff}}\
*{box-sizing:border-box}body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.5 system-ui,sans-serif}\
main{max-width:76rem;margin:0 auto;padding:1rem}h1{font-size:1.5rem;margin:.5rem 0;overflow-wrap:anywhere}h2{font-size:1.15rem;margin:2rem 0 .5rem}\
p{margin:.4rem 0}.soft{color:var(--soft);font-size:.9rem}.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(9.5rem,1fr));gap:.75rem}\
.card{background:var(--panel);border:1px solid var(--line);border-radius:.5rem;padding:.6rem .8rem}.card b{display:block;font-size:1.3rem}\
.card span{color:var(--soft);font-size:.85rem}.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,26rem),1fr));gap:1rem}\
.wide{overflow-x:auto}table{border-collapse:collapse}td,th{padding:.2rem .5rem;text-align:left;font-weight:400;border-bottom:1px solid var(--line);overflow-wrap:anywhere}\
td{min-width:8.5rem}th{color:var(--soft);vertical-align:top;overflow-wrap:normal}.map td{min-width:0}.map{width:100%;table-layout:fixed;font-size:.8rem;border-spacing:2px;border-collapse:separate}\
.map td,.map th{border:0;padding:.15rem 0;text-align:center;border-radius:.2rem}.map th:first-child{width:2.4rem;text-align:right;padding-right:.4rem}\
.map td{color:#10151a;position:relative;height:1.7rem}.map td:focus{outline:3px solid var(--mark);outline-offset:-1px}\
.map td:focus::after{content:attr(title);position:fixed;left:50%;bottom:1rem;width:min(36rem,100% - 2rem);transform:translateX(-50%);padding:.6rem .8rem;\
z-index:1;border-radius:.5rem;background:var(--ink);color:var(--paper);font-size:.95rem;text-align:left}\
.map td.fused{outline:2px solid var(--ink);outline-offset:-2px}\
.map small{position:absolute;right:.15rem;top:0;font-size:.6rem}\
svg{width:100%;max-width:46rem;height:auto;font:12px system-ui,sans-serif;border-radius:.5rem}.key i{display:inline-block;width:1.4em;height:.5em;border-radius:.2em;margin-right:.4em}\
.key span{margin-right:1.2rem;white-space:nowrap}@media(max-width:40rem){svg{font-size:20px}}";

pub(super) fn html(report: &Report) -> String {
    let mut page = format!(
        "<!doctype html><html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">\
         <title>fracbit plan: {title}</title><style>{STYLE}{}</style></head><body><main><h1>{title}</h1>\n",
        fracbit_chart::STYLE,
        title = escaped(&report.model)
    );
    cards(report, &mut page);
    heat_map(report, &mut page);
    curves(report, &mut page);
    analysis(report, &mut page);
    provenance(report, &mut page);
    page += "</main></body></html>\n";
    page
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

fn card(page: &mut String, value: &str, what: &str) {
    let _ = write!(page, "<div class=\"card\"><b>{}</b><span>{}</span></div>", escaped(value), escaped(what));
}

fn cards(report: &Report, page: &mut String) {
    let plan = &report.plan;
    *page += "<div class=\"cards\">";
    card(page, &format!("{:.3} bits", plan.bits_per_weight), "per weight, everything counted");
    card(page, &Bytes(plan.bytes).to_string(), "of tensors");
    card(page, &format!("{:.4}", plan.predicted_loss), "nats per token lost, predicted");
    if let Some(forecast) = &plan.forecast {
        card(
            page,
            &format!("{:.4}", forecast.kl),
            &format!("KL divergence forecast, {:.4} to {:.4}", forecast.low, forecast.high),
        );
        card(
            page,
            &format!("+{:.1} %", 100.0 * (forecast.perplexity_ratio - 1.0)),
            &format!(
                "perplexity forecast, {:.1} to {:.1}",
                100.0 * forecast.low.exp_m1(),
                100.0 * forecast.high.exp_m1()
            ),
        );
    }
    if let Some(speed) = &plan.speed {
        card(
            page,
            &format!("{:.2} ms", speed.step_us / 1000.0),
            &format!(
                "per decode step, \u{b1} {:.1} %, context {}, batch {}",
                100.0 * speed.error,
                speed.context,
                speed.batch
            ),
        );
        card(page, &format!("{:.1} tokens/s", speed.tokens_per_second), "predicted");
    }
    if !plan.fused.is_empty() {
        let members: usize = plan.fused.iter().map(Vec::len).sum();
        card(page, &format!("{} groups", plan.fused.len()), &format!("of {members} fused matrices"));
    }
    *page += "</div>\n";
}

/// Few bits are blue, many are red, half precision is grey.
fn color(bits: f64) -> String {
    if bits > 8.0 {
        return "#b8bec5".to_owned();
    }
    let share = ((bits - 1.0) / 5.0).clamp(0.0, 1.0);
    format!("hsl({:.0} 75% 70%)", 215.0 - 205.0 * share)
}

fn cell(report: &Report, layer: &PlannedMatrix, span: usize, page: &mut String) {
    let group = report.plan.fused.iter().position(|g| g.contains(&layer.name));
    let (class, mark, together) = match group {
        Some(at) => (
            " class=\"fused\"",
            format!("<small>{}</small>", letter(report, at, layer)),
            format!(", fused with {} others", report.plan.fused[at].len() - 1),
        ),
        None => ("", String::new(), String::new()),
    };
    let bits = if layer.bits >= 16.0 { "f16".to_owned() } else { format!("{:.2}", layer.bits) };
    let bits = if bits.contains('.') { bits.trim_end_matches('0').trim_end_matches('.') } else { &bits };
    let _ = write!(
        page,
        "<td{class} tabindex=\"0\" colspan=\"{span}\" style=\"background:{}\" title=\"{}: {}, {}, {}, loss {:.5}{together}\">{bits}{mark}</td>",
        color(layer.bits),
        escaped(&layer.name),
        layer.schemes,
        layer.shape,
        Bytes(layer.bytes),
        layer.predicted_loss,
    );
}

/// A letter for a group within its block, so that two groups of a block can be told apart.
fn letter(report: &Report, group: usize, layer: &PlannedMatrix) -> char {
    let block = |name: &str| match name.parse() {
        Ok(LinearId::Layer(i, _)) => Some(i),
        _ => None,
    };
    let here = block(&layer.name);
    let before = report.plan.fused[..group].iter().filter(|g| block(&g[0]) == here).count();
    char::from(b'a' + u8::try_from(before % 26).unwrap_or(0))
}

fn heat_map(report: &Report, page: &mut String) {
    *page += "<h2>Bits per matrix</h2><p class=\"soft\">Colour and number: bits per weight of the codes. A frame marks fused \
              matrices: those with the same letter in a row are one matrix and one kernel call. Point at a cell or tap it for its \
              scheme (of a matrix in bands of rows the first and the last one), size and loss.</p><div class=\"wide\"><table class=\"map\"><tr><th></th>";
    for name in ["q", "k", "v", "o", "gate", "up", "down"] {
        let _ = write!(page, "<th>{name}</th>");
    }
    *page += "</tr>";
    let all: BTreeMap<String, PlannedMatrix> = report.plan.matrices().map(|m| (m.name.clone(), m)).collect();
    let at = |id: LinearId| all.get(&id.to_string());
    let whole = |id: LinearId, head: &str, page: &mut String| {
        if let Some(matrix) = at(id) {
            let _ = write!(page, "<tr><th>{head}</th>");
            cell(report, matrix, 7, page);
            *page += "</tr>";
        }
    };
    whole(LinearId::Embed, "emb", page);
    for i in 0.. {
        let row: Vec<&PlannedMatrix> =
            LayerLinear::ALL.iter().filter_map(|&l| at(LinearId::Layer(i, l))).collect();
        if row.is_empty() {
            break;
        }
        let _ = write!(page, "<tr><th>{i}</th>");
        row.iter().for_each(|layer| cell(report, layer, 1, page));
        *page += "</tr>";
    }
    whole(LinearId::Head, "head", page);
    *page += "</table></div>\n";
}

fn curves(report: &Report, page: &mut String) {
    *page += "<h2>Loss, size and time</h2><p class=\"soft key\"><span><i style=\"background:var(--good)\"></i>best plans</span>";
    if !report.times.is_empty() {
        *page += "<span><i style=\"background:var(--bad)\"></i>without fusion</span>";
    }
    *page += "<span><i style=\"background:var(--soft)\"></i>one scheme everywhere</span>\
              <span><i style=\"background:var(--mark)\"></i>this plan</span></p><div class=\"charts\">";
    #[expect(clippy::cast_precision_loss, reason = "bytes on an axis")]
    let size = |p: &Point| (p.bytes as f64 / 1e6, p.loss);
    let time = |p: &Point| p.step_us.map(|us| (us / 1000.0, p.loss));
    let dots = |place: &dyn Fn(&Point) -> Option<(f64, f64)>| {
        let one = |u: &super::Uniform| Some(drawn(place(&u.at)?).titled(u.scheme.to_string()));
        let points = report.uniform.iter().filter_map(one).collect();
        Series { color: Some("var(--soft)"), ..Series::dots("one scheme everywhere", points) }
    };
    let line = |name, color, points| Series { color: Some(color), radius: 0.0, ..Series::line(name, points) };
    let chosen =
        |at| Series { color: Some("var(--mark)"), radius: 6.0, ..Series::dots("this plan", vec![drawn(at)]) };
    let loss = Axis { label: "", scale: Scale::Logarithmic };
    let here = Point::of(&report.plan);
    let best = report.sizes.iter().map(|p| drawn(size(p))).collect();
    let by_size = Chart {
        title: "loss over MB of tensors",
        x: Axis { label: "MB of tensors", scale: Scale::Logarithmic },
        y: loss,
        series: vec![dots(&|p| Some(size(p))), line("best plans", "var(--good)", best), chosen(size(&here))],
        limit: None,
    };
    *page += &by_size.figure();
    if let Some(at) = time(&here) {
        let timed = |points: &[Point]| points.iter().filter_map(time).map(drawn).collect();
        let by_time = Chart {
            title: "loss over ms per decode step",
            x: Axis { label: "ms per decode step", scale: Scale::Logarithmic },
            y: loss,
            series: vec![
                dots(&time),
                line("without fusion", "var(--bad)", timed(&report.times_unfused)),
                line("best plans", "var(--good)", timed(&report.times)),
                chosen(at),
            ],
            limit: report.plan.speed.as_ref().and_then(|s| s.limit_us).map(|us| us / 1000.0),
        };
        *page += &by_time.figure();
    }
    *page += "</div><p class=\"soft\">Vertical: predicted loss, nats per token.</p>\n";
}

/// A point of a chart.
fn drawn(at: (f64, f64)) -> fracbit_chart::Point {
    at.into()
}

fn rows(page: &mut String, rows: &[(&str, String)]) {
    *page += "<div class=\"wide\"><table>";
    for (name, value) in rows {
        let _ = write!(page, "<tr><th>{name}</th><td>{}</td></tr>", escaped(value));
    }
    *page += "</table></div>\n";
}

fn gains(page: &mut String, title: &str, list: &[Gain]) {
    if list.is_empty() {
        return;
    }
    let _ = write!(page, "<p>{title}</p><div class=\"wide\"><table>");
    for gain in list.iter().take(6) {
        let _ = write!(
            page,
            "<tr><th>{}</th><td>{:.6} less ({:.2} %)</td></tr>",
            escaped(&gain.what),
            gain.saved,
            100.0 * gain.share
        );
    }
    *page += "</table></div>\n";
}

fn analysis(report: &Report, page: &mut String) {
    let explained = &report.explanation;
    *page += "<h2>Where the loss comes from</h2>";
    let gap = explained.gap;
    let mut table = vec![
        (
            "ideal quantizer",
            format!("{:.5} at {:.3} bits of codes per weight", gap.ideal, explained.code_bits),
        ),
        ("distortion gap", format!("{:.5}: codes above the rate-distortion bound", gap.distortion)),
        ("allocation gap", format!("{:.5}: bit-widths other than the ideal ones", gap.allocation)),
        (
            "proven bound",
            format!("{:.6}: no plan of this palette within the budget loses less", report.plan.lower_bound),
        ),
    ];
    if explained.prices.byte > 0.0 {
        table.push(("a megabyte more", format!("would save {:.6}", 1e6 * explained.prices.byte)));
    }
    if explained.prices.microsecond > 0.0 {
        table.push(("a millisecond more", format!("would save {:.6}", 1e3 * explained.prices.microsecond)));
    }
    rows(page, &table);
    gains(page, "One more scheme would buy, at most:", &explained.schemes);
    gains(page, "One more bit-width would buy, at most:", &explained.widths);
}

fn provenance(report: &Report, page: &mut String) {
    *page += "<h2>Where this comes from</h2>";
    let plan = &report.plan;
    let mut table = vec![
        ("command", report.command.clone()),
        ("fracbit", report.fracbit.clone()),
        ("checkpoint", plan.source_hash.clone()),
        ("objective", format!("{}: {}", plan.objective_kind.name(), plan.objective)),
        ("rotation", format!("{}, seed {}", plan.rotation, plan.seed)),
    ];
    if let Some(limits) = &report.limits {
        table.push(("machine", limits.machine.clone()));
        table.push((
            "its limits",
            format!(
                "reads {:.1} GB/s, int8 products {:.0} GMAC/s",
                limits.read_gb_per_s, limits.int8_gmac_per_s
            ),
        ));
    }
    rows(page, &table);
}
